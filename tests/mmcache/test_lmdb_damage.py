"""A file store whose file is damaged, replaced or cut short: it neither kills, nor serves anything wrong."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import lmdb
import pytest

from mmcache.tiers.base import TierError
from tests.mmcache.lmdb_store import fill, open_store
from tests.mmcache.tier_contract import make_entry, read_back

NUM_ROUNDS = 200 if os.environ.get("MMCACHE_SOAK") else 6

_USE = """
import asyncio, os, sys
from pathlib import Path
from mmcache.tiers.base import TierError
from mmcache.tiers.lmdb import LmdbTier
from tests.mmcache.tier_contract import make_entry, read_back

async def main(path, live_bytes):
    tier = await LmdbTier.open(path, 16 << 20)
    entries = [make_entry(number) for number in range(60)]
    found = await tier.find([entry.key for entry, _ in entries])
    if live_bytes:
        os.truncate(path, int(live_bytes))
    outcomes = set()
    for entry, payload in entries:
        try:
            got = await read_back(tier, entry)
            assert got is None or got == payload
            await tier.put(*make_entry(1000))
            outcomes.add("served")
        except TierError as error:
            assert "damaged" in str(error) or "out of use" in str(error), error
            outcomes.add("failed")
    assert await tier.close(30.0)
    print(len(found) - found.count(None), tier.counters["damaged_files"], *sorted(outcomes))

asyncio.run(main(Path(sys.argv[1]), *(sys.argv[2:] or [None])))
"""


def _use_in_a_process(path: Path, live_bytes: int | None = None) -> tuple[int, int, list[str]]:
    """Entries found, damaged files and outcomes of a process that reads and writes, and whose death is an error."""
    command = [sys.executable, "-c", _USE, str(path)] + ([] if live_bytes is None else [str(live_bytes)])
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    num_found, num_damaged, *outcomes = ran.stdout.split()
    return int(num_found), int(num_damaged), outcomes


@pytest.mark.parametrize("share", [0.0001, 0.001, 0.01, 0.5, 0.9])
def test_a_file_truncated_while_stopped_is_set_aside(tmp_path: Path, share: float) -> None:
    fill(tmp_path)
    path = tmp_path / "store.lmdb"
    size = path.stat().st_size
    (tmp_path / "store.lmdb.damaged").write_bytes(b"an earlier one")
    os.truncate(path, int(size * share))
    assert _use_in_a_process(path) == (0, 1, ["served"])
    assert (tmp_path / "store.lmdb.damaged").stat().st_size == int(size * share)
    assert _use_in_a_process(path) == (0, 0, ["served"])


@pytest.mark.parametrize("share", [0.0, 0.0005, 0.5, 0.95])
def test_a_file_truncated_under_a_process_fails_until_the_next_start(tmp_path: Path, share: float) -> None:
    fill(tmp_path)
    path = tmp_path / "store.lmdb"
    assert _use_in_a_process(path, int(path.stat().st_size * share)) == (60, 1, ["failed"])
    assert _use_in_a_process(path) == (0, 0, ["served"])


def test_a_replaced_file_fails_until_the_next_start_and_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "store.lmdb"
    (mine, payload), (other, other_payload) = make_entry(1), make_entry(2)
    (tmp_path / "other").mkdir()
    with open_store(tmp_path / "other") as (tier, runner):
        runner.run(tier.put(other, other_payload))
    with open_store(tmp_path) as (tier, runner):
        runner.run(tier.put(mine, payload))
        (tmp_path / "other" / "store.lmdb").replace(path)
        for _ in range(2):
            with pytest.raises(TierError, match="another file is in its place"):
                runner.run(tier.find([mine.key]))
    assert not (tmp_path / "store.lmdb.damaged").exists()
    with open_store(tmp_path) as (tier, runner):
        assert runner.run(tier.find([mine.key, other.key])) == [None, other]


@pytest.mark.parametrize("first_page", [0, 1, 2, 5, 20])
def test_garbage_pages_are_set_aside(tmp_path: Path, first_page: int, caplog: pytest.LogCaptureFixture) -> None:
    fill(tmp_path)
    path = tmp_path / "store.lmdb"
    with path.open("r+b") as file:
        file.seek(first_page * 4096)
        file.write(random.Random(first_page).randbytes(400 * 4096))
    damaged = path.read_bytes()
    with open_store(tmp_path) as (tier, runner):
        assert (tier.counters["damaged_files"], tier.counters["entries"]) == (1, 0)
        runner.run(tier.put(*make_entry(1)))
        assert runner.run(read_back(tier, make_entry(1)[0])) == make_entry(1)[1]
    assert path.with_name("store.lmdb.damaged").read_bytes() == damaged
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_a_store_without_its_mark_is_damaged(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    with lmdb.Environment(str(tmp_path / "store.lmdb"), subdir=False) as env, env.begin(write=True) as txn:
        assert txn.delete(b"mmcache")
    with open_store(tmp_path) as (tier, _):
        assert (tier.counters["damaged_files"], tier.counters["entries"]) == (1, 0)


def test_flipped_bits_never_kill(tmp_path: Path) -> None:
    """Wherever they are: in what LMDB trusts, in entries, or in free pages."""
    fill(tmp_path)
    path = tmp_path / "store.lmdb"
    whole = path.read_bytes()
    flips = random.Random(11)
    for _ in range(NUM_ROUNDS):
        altered = bytearray(whole)
        for _ in range(20):
            altered[flips.randrange(len(whole) if flips.random() < 0.5 else 8 * 4096)] ^= 1 << flips.randrange(8)
        path.write_bytes(altered)
        _, _, outcomes = _use_in_a_process(path)
        assert outcomes in (["served"], ["failed"], ["failed", "served"])


def test_a_whole_file_is_never_taken_for_damaged(tmp_path: Path) -> None:
    """Puts of all sizes, replacements, removals and evictions, with the file opened anew between them."""
    changes = random.Random(5)
    for _ in range(8):
        with open_store(tmp_path) as (tier, runner):
            assert tier.counters["damaged_files"] == 0
            for _ in range(40):
                entry, payload = make_entry(changes.randrange(60), changes.choice([1, 40, 300, 9000, 20_000]))
                runner.run(tier.put(entry, payload))
                runner.run(tier.remove([changes.randrange(60).to_bytes(32, "big")] * (changes.random() < 0.4)))
    assert not (tmp_path / "store.lmdb.damaged").exists()
