"""The state folder and its seed: private, agreed upon, refused when others could have touched it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from mmcache.errors import ConfigError
from mmcache.server.state import StateFolder, load_or_create_seed, prepare_state


def test_a_missing_folder_is_made_private(tmp_path: Path) -> None:
    folder = prepare_state(tmp_path / "a" / "b")
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert prepare_state(folder.path) == folder


def test_a_seed_is_made_once_and_kept(tmp_path: Path) -> None:
    folder = prepare_state(tmp_path / "state")
    seed = load_or_create_seed(folder)
    assert 0 <= seed < 1 << 64
    assert load_or_create_seed(folder) == seed
    assert folder.seed_file.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in folder.path.iterdir()) == ["seed"]
    assert load_or_create_seed(prepare_state(tmp_path / "other")) != seed


def test_starters_that_race_agree(tmp_path: Path) -> None:
    folder = prepare_state(tmp_path / "state")
    barrier, seeds = threading.Barrier(8), []

    def start() -> None:
        barrier.wait()
        seeds.append(load_or_create_seed(folder))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seeds) == 8
    assert len(set(seeds)) == 1


def test_what_a_killed_starter_left_is_no_hindrance(tmp_path: Path) -> None:
    folder = prepare_state(tmp_path / "state")
    (folder.path / "seed.new").write_bytes(b"half")
    load_or_create_seed(folder)
    assert sorted(path.name for path in folder.path.iterdir()) == ["seed"]


def _with_seed(folder: Path, content: bytes, mode: int = 0o600) -> StateFolder:
    state = prepare_state(folder)
    state.seed_file.write_bytes(content)
    state.seed_file.chmod(mode)
    return state


def test_a_given_seed_is_read(tmp_path: Path) -> None:
    assert load_or_create_seed(_with_seed(tmp_path / "s", b"0123456789abcdef\n")) == 0x0123456789ABCDEF


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_seed_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match="chmod 600"):
        load_or_create_seed(_with_seed(tmp_path / "s", b"0123456789abcdef\n", mode))


@pytest.mark.parametrize("content", [b"", b"0123456789abcdef", b"0123456789ABCDEF\n", b"0x23456789abcdef\n", b"0" * 65])
def test_a_malformed_seed_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ConfigError, match="16 hex digits"):
        load_or_create_seed(_with_seed(tmp_path / "s", content))


def test_a_seed_that_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    folder = prepare_state(tmp_path / "state")
    os.mkfifo(folder.seed_file, 0o600)
    with pytest.raises(ConfigError, match="regular file"):
        load_or_create_seed(folder)
    folder.seed_file.unlink()
    folder.seed_file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="readable or creatable"):
        load_or_create_seed(folder)


def test_folders_that_others_could_change_are_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(ConfigError, match="must not be writable"):
        prepare_state(shared)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="must be a folder that can be created"):
        prepare_state(tmp_path / "file")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = prepare_state(tmp_path / "state").path
    os.chown(folder, 65534, 65534)
    with pytest.raises(ConfigError, match="must belong to the sidecar's user 0, not to 65534"):
        prepare_state(folder)
