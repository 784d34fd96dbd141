"""When a digest of weights is taken from the cache, and when never."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from encoder import stamps
from encoder.errors import CheckpointError
from encoder.model import Encoder
from mmcache.server.digests import DigestCache
from mmcache.server.state_cache import MAX_ENTRIES
from tests.mmcache.model_reports import change_one_weight, change_settings, report_of
from tests.mmcache.support import SidecarProcess
from tests.mmcache.weights import write_checkpoint


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as settled at once: tests need not wait."""
    monkeypatch.setattr(stamps, "SETTLED_NS", -(1 << 62))


def test_a_known_identity_saves_the_digest(tmp_path: Path, settled: None) -> None:
    """The cache is believed: a digest that no weights have shows it."""
    folder = write_checkpoint(tmp_path / "model", 1, num_shards=3)
    made = report_of(folder)
    assert len(made.identity) == 32
    believed = report_of(folder, {made.identity: "ab" * 16})
    assert (believed.identity, believed.weights_digest) == (made.identity, b"\xab" * 16)
    assert report_of(folder, {"0" * 32: "ab" * 16}).weights_digest == made.weights_digest


@pytest.mark.parametrize(
    "change",
    [
        change_one_weight,
        change_settings,
        lambda folder: (folder / "model.safetensors").touch(),
        lambda folder: os.link(folder / "model.safetensors", folder / "link"),
        lambda folder: os.replace(write_checkpoint(folder.parent / "b", 2) / "model.safetensors",
                                  folder / "model.safetensors"),
    ],
)  # fmt: skip
def test_identity_changes_with_the_files(tmp_path: Path, settled: None, change: Callable[[Path], None]) -> None:
    folder = write_checkpoint(tmp_path / "model", 1)
    before = report_of(folder)
    time.sleep(0.02)  # the file system's clock ticks
    change(folder)
    assert report_of(folder, {before.identity: "ab" * 16}).weights_digest != b"\xab" * 16
    assert report_of(folder).identity != before.identity


def test_identity_covers_the_dtype(tmp_path: Path, settled: None) -> None:
    folder = write_checkpoint(tmp_path / "model", 1)
    assert report_of(folder).identity != report_of(folder, dtype="bfloat16").identity


def test_old_times_do_not_hide_a_change(tmp_path: Path, settled: None) -> None:
    """Size and modification time as before, as `cp -p` or `rsync` would leave them: the time of change tells."""
    folder = write_checkpoint(tmp_path / "model", 1)
    file = folder / "model.safetensors"
    before, state = report_of(folder), file.stat()
    time.sleep(0.02)
    change_one_weight(folder)
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (state.st_size, state.st_mtime_ns)
    after = report_of(folder, {before.identity: before.weights_digest.hex()})
    assert after.weights_digest != before.weights_digest


def test_files_that_changed_just_now_are_not_trusted(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", 1)
    assert report_of(folder).identity == ""
    (stamp,) = stamps.stamp_files([folder / "model.safetensors"])
    changed_ns = max(stamp.modified_ns, stamp.changed_ns)
    assert not stamps.are_settled([stamp], changed_ns + stamps.SETTLED_NS - 1)
    assert stamps.are_settled([stamp], changed_ns + stamps.SETTLED_NS)
    from_the_future = replace(stamp, modified_ns=changed_ns + 2 * stamps.SETTLED_NS)
    assert not stamps.are_settled([stamp, from_the_future], changed_ns + stamps.SETTLED_NS)


def test_files_that_change_while_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half old, half new: weights that nobody trained are not served."""
    folder = write_checkpoint(tmp_path / "model", 1)
    load = Encoder.load

    def load_slowly(*args: Any, **kwargs: Any) -> Encoder:
        encoder = load(*args, **kwargs)
        time.sleep(0.02)
        change_one_weight(folder)
        return encoder

    monkeypatch.setattr(Encoder, "load", load_slowly)
    with pytest.raises(CheckpointError, match="changed while they were read"):
        report_of(folder)


def test_the_cache_file(tmp_path: Path) -> None:
    path = tmp_path / "digests.json"
    cache = DigestCache(path)
    cache.load()
    assert cache.known == {}
    for number in range(MAX_ENTRIES + 3):
        cache.add(f"{number:032x}", "ab" * 16)
    assert path.stat().st_mode & 0o777 == 0o600
    again = DigestCache(path)
    again.load()
    assert again.known == cache.known
    assert list(again.known) == [f"{number:032x}" for number in range(3, MAX_ENTRIES + 3)], "the oldest went"
    written = path.stat().st_mtime_ns
    again.add(f"{5:032x}", "ab" * 16)
    assert path.stat().st_mtime_ns == written, "what is known is not written again"
    assert os.listdir(tmp_path) == ["digests.json"]


def damaged(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def made_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: os.truncate(path, 0),
        lambda path: os.truncate(path, path.stat().st_size // 2),
        lambda path: damaged(path, b"ab", b"ac"),
        lambda path: damaged(path, b"ab", b"zz"),
        lambda path: damaged(path, b'"version": 1', b'"version": 2'),
        lambda path: path.write_bytes(b"\xff\xfe"),
        lambda path: path.write_text("[1]"),
        lambda path: path.write_text('{"version": 1, "digests": {"a": 1}}'),
        lambda path: path.write_text(path.read_text() + " " * 10000),
        lambda path: path.write_text("[" * 4000),
        lambda path: path.chmod(0o644),
        linked,
        made_a_folder,
    ],
)
def test_a_damaged_or_foreign_cache_is_none(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = tmp_path / "digests.json"
    DigestCache(path).add("0" * 32, "ab" * 16)
    damage(path)
    cache = DigestCache(path)
    cache.load()
    assert cache.known == {}
    cache.add("1" * 32, "cd" * 16)
    assert cache.known == {"1" * 32: "cd" * 16}, "kept for this run, whether it can be written or not"


def test_weights_replaced_between_two_starts(tmp_path: Path) -> None:
    """Real sidecars: the cache is written once the files have settled, used, and never hides a change."""
    folder = write_checkpoint(tmp_path / "model", 1)
    digests = tmp_path / "state" / "digests.json"
    now = time.time()
    os.utime(folder / "model.safetensors", (now, now + 3600))
    with SidecarProcess(tmp_path, model=str(folder)) as sidecar:
        first = sidecar.stats()["fingerprint"]
    assert not digests.exists(), "a file from the future is never settled"
    os.utime(folder / "model.safetensors", (now, now))
    time.sleep(stamps.SETTLED_NS / 1e9)
    with SidecarProcess(tmp_path, model=str(folder), ranks="2") as sidecar:
        assert sidecar.stats()["fingerprint"] == first
    cache = DigestCache(digests)
    cache.load()
    assert len(cache.known) == 1
    change_one_weight(folder)
    with SidecarProcess(tmp_path, model=str(folder)) as sidecar:
        assert sidecar.stats()["fingerprint"] != first
