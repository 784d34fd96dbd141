"""Reloads that fail, that ranks die in, that come two at a time or too late."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mmcache
from tests.mmcache.reloads import PICTURES, Reload, assert_same, encoded, kill_ranks, stopped, under_way
from tests.mmcache.support import MMCACHE, SidecarProcess, clean_environ, eventually


def test_what_cannot_be_loaded_changes_nothing(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    a, b = folders
    (b / "model.safetensors").write_bytes((b / "model.safetensors").read_bytes()[:-1000])
    with SidecarProcess(tmp_path, model=str(a), ranks="2") as sidecar, sidecar.connect() as client:
        before, of_a = client.fingerprint, encoded(client, "encoded")
        with pytest.raises(mmcache.CheckpointError, match=r"model = .*model\.safetensors"):
            client.reload(b)
        (b / "config.json").write_text("{")
        with pytest.raises(mmcache.ConfigError, match=r"model = .*config\.json"):
            client.reload(b)
        with pytest.raises(mmcache.ConfigError, match="neither a folder nor a preset"):
            client.reload("no-such-model")
        assert (client.fingerprint, client.stats()["reloads"]) == (before, 0)
        assert_same(encoded(client, "pool"), of_a)
        (victim, _) = client.stats()["ranks"]["pids"]
        os.kill(victim, signal.SIGKILL)
        eventually(lambda: client.stats()["ranks"]["ready"] == 2, "it comes back with the model that is served")
        assert client.stats()["fingerprint"] == str(before)


def test_a_rank_killed_during_a_reload(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    a, b = folders
    with SidecarProcess(tmp_path, model=str(a), ranks="2") as sidecar, sidecar.connect() as client:
        before, of_a = client.fingerprint, encoded(client, "encoded")
        victim = client.stats()["ranks"]["pids"][0]
        with stopped(victim):
            reload = Reload(sidecar, b)
            under_way(sidecar, 1)
            os.kill(victim, signal.SIGKILL)
            reload.join()
        assert isinstance(reload.result, mmcache.SidecarError)
        assert "rank 0 died while it loaded it" in str(reload.result)
        eventually(lambda: client.stats()["ranks"]["ready"] == 2, "it is replaced")
        for lease, array in zip(client.encode(PICTURES), of_a, strict=True):
            with lease:
                assert lease.fingerprint == before
                np.testing.assert_allclose(lease.numpy(), array, rtol=1e-4, atol=1e-5)
        assert client.reload(b) != before
        of_b = encoded(client, "encoded")
        kill_ranks(client)
        assert_same(encoded(client, "encoded"), of_b)
        assert client.stats()["fingerprint"] == str(client.fingerprint)


def test_one_reload_at_a_time(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    """The second is refused; the first goes on although its client is gone."""
    a, b = folders
    with SidecarProcess(tmp_path, model=str(a)) as sidecar, sidecar.connect() as client:
        before = client.fingerprint
        code = "import sys, mmcache; mmcache.connect(sys.argv[1]).reload(sys.argv[2])"
        with stopped(client.stats()["ranks"]["pids"][0]):
            command = [sys.executable, "-c", code, str(sidecar.socket), str(b)]
            with subprocess.Popen(command, env=clean_environ()) as gone:
                under_way(sidecar, 1)
                with pytest.raises(mmcache.SidecarError, match="under way"):
                    client.reload(a)
                gone.kill()
        eventually(lambda: client.stats()["reloads"] == 1, "it ended without its client")
        assert client.fingerprint != before, "heard with the call for stats"


def test_a_reload_waits_for_a_rank(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    """The only rank is being restarted when new weights are asked for; a request waits too."""
    a, b = folders
    with SidecarProcess(tmp_path, model=str(a)) as sidecar, sidecar.connect() as client:
        before = client.fingerprint
        kill_ranks(client)
        assert client.reload(b) != before
        encoded(client, "encoded")


def test_a_late_answer_is_not_taken_for_anothers(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    a, b = folders
    with SidecarProcess(tmp_path, model=str(a)) as sidecar, sidecar.connect(timeout=2) as client:
        with stopped(client.stats()["ranks"]["pids"][0]), pytest.raises(mmcache.RequestTimeout):
            client.reload(b)
        eventually(lambda: client.stats()["reloads"] == 1, "the first goes on")
        with pytest.raises(mmcache.ConfigError):
            client.reload("no-such-model")
        assert client.stats()["model"] == str(b)


def test_the_command(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    a, b = folders

    def reload(*arguments: str, cwd: Path = tmp_path) -> subprocess.CompletedProcess[str]:
        command = [*MMCACHE, "reload", f"--socket={sidecar.socket}", *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=120, cwd=cwd, check=False,
            env=clean_environ(PYTHONPATH=str(Path(mmcache.__file__).parents[1])),
        )  # fmt: skip

    with SidecarProcess(tmp_path, model=str(a)) as sidecar:
        before = sidecar.stats()["fingerprint"]
        done = reload("--model", "b")
        after = sidecar.stats()["fingerprint"]
        assert done.stdout == f"new weights are served: fingerprint {after} (was {before})\n"
        assert (done.returncode, sidecar.stats()["model"]) == (0, str(b))
        done = reload()
        assert (done.returncode, done.stdout) == (0, f"the same weights as before: fingerprint {after}\n")
        done = reload("--model", "c")
        assert done.returncode == 2
        assert done.stderr.startswith(f"mmcache: model = {tmp_path}/c: ")
        (b / "model.safetensors").write_bytes(b"")
        done = reload()
        assert done.returncode == 1
        assert done.stderr.startswith(f"mmcache: model = {b}: ")
        assert sidecar.stats()["fingerprint"] == after
        assert reload("--model", "moonvit-tiny").returncode == 0
        assert sidecar.stats()["model"] == "moonvit-tiny"
