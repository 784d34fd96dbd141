"""`mmcache serve`: settings, sockets, signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmcache
from tests.mmcache.support import MMCACHE, SidecarProcess, clean_environ, eventually, image


def serve(*flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `mmcache serve` to its end (these calls fail before they serve)."""
    command = [*MMCACHE, "serve", *flags]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=clean_environ(**environ), check=False
    )


@pytest.mark.parametrize(
    ("flags", "environ", "words"),
    [
        (["--pool-bytes", "lots"], {}, ["pool_bytes", "flag --pool-bytes", "512MiB"]),
        ([], {"MMCACHE_RANKS": "0"}, ["ranks", "variable MMCACHE_RANKS", "1 to 64"]),
        (["--device", "cuda"], {"CUDA_VISIBLE_DEVICES": ""}, ["device", "flag --device", "no CUDA device is visible"]),
        (["--store", "redis://localhost"], {}, ["store", "flag --store", "not available yet"]),
        (["--model", "nope"], {}, ["model", "flag --model", "moonvit-tiny, kimi-k2.5"]),
        (["--store", "ftp://x/y"], {}, ["store", "unknown kind"]),
        (["--config", "/nonexistent.toml"], {}, ["config", "No such file"]),
        (["--socket", "/tmp/" + "x" * 120], {}, ["socket", "107"]),
    ],
)
def test_wrong_setting_is_one_error_and_status_2(flags: list[str], environ: dict[str, str], words: list[str]) -> None:
    done = serve(*flags, **environ)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    for word in words:
        assert word in done.stderr


def test_a_model_that_does_not_load_names_its_tensors(tmp_path: Path) -> None:
    """The setting is right, the checkpoint is not: every rank fails, and one of them says why."""
    (tmp_path / "model").mkdir()
    config = {"model_type": "kimi_k25", "vision_config": {}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    flags = (f"--state={tmp_path}/state", f"--socket={tmp_path}/s", "--ranks=2", "--pool-bytes=1MiB")
    done = serve(*flags, "--model", str(tmp_path / "model"))
    assert done.returncode in (1, 2)
    assert str(tmp_path / "model") in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) in (["model"], ["model", "state"])


def test_memory_that_is_not_there_names_its_setting(tmp_path: Path) -> None:
    done = serve(f"--state={tmp_path}/state", f"--socket={tmp_path}/s", "--pool-bytes=10TiB", "--store=none")
    assert done.returncode == 2
    assert "pool_bytes" in done.stderr
    assert "Traceback" not in done.stderr


def test_flags_win_over_variables_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mmcache.toml"
    file.write_text('pool_bytes = "3MiB"\nranks = 1\ncontrol_words = 128\ningest_bytes = "8MiB"\nstore = "none"\n')
    command = [*MMCACHE, "serve", f"--config={file}", f"--state={tmp_path}/state", f"--socket={tmp_path}/s"]
    environ = clean_environ(MMCACHE_POOL_BYTES="2MiB", MMCACHE_CONTROL_WORDS="256")
    command += ["--control-words=512"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        assert " ready on " in process.stdout.readline()
        with mmcache.connect(tmp_path / "s") as client:
            stats = client.stats()
        process.terminate()
    assert stats["leases"]["control_words"] == 512
    assert stats["pool"]["bytes_total"] == 2 << 20
    assert stats["ingest"]["bytes_total"] == 8 << 20
    assert process.returncode == 0


def test_clients_find_the_default_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = clean_environ(XDG_RUNTIME_DIR=str(tmp_path), XDG_STATE_HOME=str(tmp_path / "xdg"))
    command = [*MMCACHE, "serve", "--ranks=1", "--pool-bytes=1MiB", "--ingest-bytes=8MiB"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        assert f"ready on {tmp_path}/mmcache.sock" in process.stdout.readline()
        monkeypatch.delenv("MMCACHE_SOCKET", raising=False)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        with mmcache.connect() as client:
            client.encode([image(1)])[0].release()
        process.terminate()
    state = tmp_path / "xdg" / "mmcache"
    assert stat.S_IMODE((state / "seed").stat().st_mode) == 0o600
    assert any(state.glob("embeddings.lmdb*"))


def test_socket_is_its_owners_alone(sidecar: SidecarProcess) -> None:
    assert stat.S_IMODE(sidecar.socket.stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused(sidecar: SidecarProcess) -> None:
    for path in (sidecar.socket, *sidecar.socket.parents):
        if str(path).startswith("/tmp/") and path != Path("/tmp"):
            path.chmod(0o777)
    code = (
        "import os, sys, mmcache\n"
        "os.setuid(65534)\n"
        "try: mmcache.connect(sys.argv[1])\n"
        "except mmcache.SidecarUnavailable as error: print(error)\n"
    )
    command = [sys.executable, "-c", code, str(sidecar.socket)]
    done = subprocess.run(command, capture_output=True, text=True, env=clean_environ(), check=False)
    assert "only user 0 may connect, not 65534" in done.stdout, done


def test_a_live_socket_blocks_a_second_sidecar(sidecar: SidecarProcess) -> None:
    done = serve(f"--state={sidecar.folder}/other", f"--socket={sidecar.socket}", "--store=none")
    assert done.returncode == 1
    assert "another sidecar runs on" in done.stderr
    assert sidecar.stats()["items"]["total"] == 0, "the first one goes on"


def test_a_foreign_listener_blocks(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        done = serve(f"--state={tmp_path}/state", f"--socket={path}", "--store=none")
    assert done.returncode == 1
    assert "something listens on" in done.stderr
    path.unlink()
    path.write_text("precious")
    done = serve(f"--state={tmp_path}/state", f"--socket={path}", "--store=none")
    assert done.returncode == 2
    assert "not a socket" in done.stderr
    assert path.read_text() == "precious"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_leaves_nothing(tmp_path: Path, number: int) -> None:
    sidecar = SidecarProcess(tmp_path).start()
    client = sidecar.connect()
    results: list[Any] = []
    pictures = [image(seed, 420, 560) for seed in range(8)]
    work = threading.Thread(target=lambda: results.extend(client.encode(pictures, errors="return")))
    work.start()
    eventually(lambda: sidecar.stats()["encode"]["queued"] > 0, "work is in flight")
    sidecar.send_signal(number)
    work.join()
    assert sidecar.wait() == 0
    assert all(isinstance(result, mmcache.Lease) for result in results), results
    assert results[0].numpy().any(), "what was handed out stays readable"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "state"]
    for lease in results:
        lease.release()
    client.close()


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    sidecar = SidecarProcess(tmp_path, drain_timeout_s="600").start()
    client = sidecar.connect()
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.extend(client.encode([image(seed, 840, 1120) for seed in range(40)], errors="return"))
        except mmcache.ConnectionLost as error:
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    eventually(lambda: sidecar.stats()["encode"]["queued"] > 0, "work is in flight")
    sidecar.send_signal(signal.SIGTERM)
    eventually(lambda: not sidecar.socket.exists(), "it drains")
    sidecar.send_signal(signal.SIGTERM)
    assert sidecar.wait() == 0
    thread.join()
    assert isinstance(outcome[0], mmcache.ConnectionLost)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "state"]


def test_store_survives_a_restart(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store.lmdb"
    pictures = [image(seed, 28 * seed, 56) for seed in range(1, 6)]
    with SidecarProcess(tmp_path, store=store) as sidecar, sidecar.connect() as client:
        leases = client.encode(pictures)
        expected = [lease.numpy().copy() for lease in leases]
        for lease in leases:
            lease.release()
    with SidecarProcess(tmp_path, store=store) as sidecar, sidecar.connect() as client:
        leases = client.encode(pictures)
        assert {lease.origin for lease in leases} == {"store"}
        for lease, array in zip(leases, expected, strict=True):
            np.testing.assert_array_equal(lease.numpy(), array)
            lease.release()
        stats = client.stats()
        assert (stats["items"]["hit_store"], stats["items"]["encoded"]) == (5, 0)


def test_another_model_does_not_get_the_old_embeddings(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store.lmdb"
    with SidecarProcess(tmp_path, store=store) as sidecar, sidecar.connect() as client:
        first = client.fingerprint
        client.encode([image(1)])[0].release()
    with SidecarProcess(tmp_path, store=store, dtype="bfloat16") as sidecar, sidecar.connect() as client:
        assert client.fingerprint != first
        with client.encode([image(1)])[0] as lease:
            assert (lease.origin, lease.dtype) == ("encoded", "bfloat16")
            assert lease.numpy().dtype == np.float32
            assert str(lease.tensor.dtype) == "torch.bfloat16"
            np.testing.assert_array_equal(lease.tensor.float().numpy(), lease.numpy())


def test_packages_of_the_current_folder_are_not_imported(tmp_path: Path) -> None:
    """Our packages have common names; a user's own folder of that name must not end up in a rank."""
    for name in ("encoder", "ipc", "mmcache"):
        (tmp_path / "project" / name).mkdir(parents=True)
        (tmp_path / "project" / name / "__init__.py").write_text("raise RuntimeError('the wrong package')")
    command = [str(Path(sys.executable).with_name("mmcache")), "serve", f"--state={tmp_path}/st"]
    command += [f"--socket={tmp_path}/s", "--ranks=1", "--pool-bytes=1MiB", "--ingest-bytes=1MiB", "--store=none"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=clean_environ(), cwd=tmp_path / "project"
    ) as process:
        assert process.stdout is not None
        assert " ready on " in process.stdout.readline()
        process.terminate()
    assert process.returncode == 0
