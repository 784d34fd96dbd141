"""The commands, run as a user runs them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

import mmcache
from examples.pictures import picture_folder
from tests.mmcache.support import MMCACHE, SidecarProcess, clean_environ


def run(*arguments: str | Path, stdin: bytes = b"", **environ: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*MMCACHE, *map(str, arguments)], input=stdin, capture_output=True, timeout=120, env=clean_environ(**environ),
        check=False,
    )  # fmt: skip
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"mmcache {mmcache.__version__}\n")


@pytest.mark.parametrize("command", [(), ("serve",), ("encode",), ("stats",)])
def test_help(command: tuple[str, ...]) -> None:
    done = run(*command, "--help")
    assert done.returncode == 0
    assert "Usage: mmcache" in done.stdout
    if command == ("serve",):
        for flag in (
            "--model", "--device", "--ranks", "--dtype", "--pool-bytes", "--store", "--state", "--socket", "--config",
        ):  # fmt: skip
            assert flag in done.stdout
        assert "[default: 256MiB]" in done.stdout
    elif command:
        assert "--socket" in done.stdout


def test_wrong_use_is_status_2() -> None:
    for arguments in (("encode",), ("frobnicate",), ("stats", "--timeout", "0"), ("stats", "--nope")):
        done = run(*arguments)
        assert done.returncode == 2, arguments
        assert "Usage: mmcache" in done.stderr


def test_no_sidecar_is_one_clear_line_and_status_1(tmp_path: Path) -> None:
    for arguments in (("stats",), ("encode", "x.png")):
        done = run(*arguments, "--socket", tmp_path / "none.sock")
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == 1
        assert "mmcache serve" in done.stderr


def test_stats(shared_sidecar: SidecarProcess) -> None:
    done = run("stats", "--json", MMCACHE_SOCKET=str(shared_sidecar.socket))
    stats = json.loads(done.stdout)
    for section, names in {
        "leases": ("active",),
        "pool": ("bytes_total", "bytes_used", "evictions"),
        "items": ("encoded", "hit_pool", "hit_store"),
        "ranks": ("ready",),
    }.items():
        for name in names:
            assert isinstance(stats[section][name], int)
    assert stats["model"] == "moonvit-tiny"
    assert len(stats["fingerprint"]) == 32
    assert isinstance(stats["errors"], dict)
    table = run("stats", "--socket", shared_sidecar.socket)
    assert table.returncode == 0
    assert "moonvit-tiny" in table.stdout
    assert "hit pool" in table.stdout


def test_encode_writes_safetensors(shared_sidecar: SidecarProcess, tmp_path: Path) -> None:
    source, out = picture_folder() / "chelsea.png", tmp_path / "out"
    twin = tmp_path / "elsewhere" / "chelsea.png"
    twin.parent.mkdir()
    shutil.copy(picture_folder() / "camera.png", twin)
    done = run(
        "encode", source, twin, picture_folder() / "coffee.png", "-", "--out", out, "--socket", shared_sidecar.socket,
        stdin=(picture_folder() / "text.png").read_bytes(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()
    assert len(rows) == 4
    with shared_sidecar.connect() as client:
        keys = [str(client.key(path)) for path in (source, twin)]
        assert sorted(path.name for path in out.iterdir()) == sorted(
            [f"chelsea-{key[:12]}.safetensors" for key in keys] + ["coffee.safetensors", "stdin.safetensors"]
        )
        with client.encode([source])[0] as lease, safe_open(out / f"chelsea-{keys[0][:12]}.safetensors", "np") as file:
            np.testing.assert_array_equal(file.get_tensor("embedding"), lease.numpy())
            assert file.metadata()["key"] == keys[0]
            assert file.metadata()["fingerprint"] == str(client.fingerprint)
            assert file.metadata()["grid_thw"] == "1,22,34"
    assert keys[0][:12] in rows[0]
    assert "187 tokens" in rows[0]


def test_encode_goes_on_after_a_bad_file(shared_sidecar: SidecarProcess, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no picture")
    done = run(
        "encode", tmp_path / "notes.txt", picture_folder() / "horse.png", tmp_path / "missing.png",
        "--socket", shared_sidecar.socket,
    )  # fmt: skip
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) == 1
    assert "UndecodableImage" in done.stderr
    assert "UnreadableItem" in done.stderr
    assert "3 images in" in done.stderr
    assert "2 failed" in done.stderr


def test_out_that_cannot_be_made_is_one_line(shared_sidecar: SidecarProcess) -> None:
    done = run("encode", picture_folder() / "horse.png", "--out", "/proc/out", "--socket", shared_sidecar.socket)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "/proc/out cannot be created" in done.stderr


def test_a_closed_pipe_is_no_traceback(shared_sidecar: SidecarProcess) -> None:
    command = f"{' '.join(MMCACHE)} stats --socket {shared_sidecar.socket} | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=clean_environ(), check=False)
    assert "Traceback" not in done.stderr
    assert len(done.stdout.splitlines()) == 1


def demo(*images: str) -> list[str]:
    command = [sys.executable, "-m", "examples.demo", *images]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=clean_environ(), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_demo() -> None:
    lines = demo()
    rows = [line for line in lines if line.endswith(" ms")]
    assert len(rows) == 24
    for row, origin in zip(rows, ["encoded"] * 8 + ["pool"] * 8 + ["store"] * 8, strict=True):
        assert f"  {origin} " in row
    assert "7400×84" in rows[7]
    assert sum("random weights" in line and "--model" in line for line in lines) == 1
    assert any(line.startswith("fingerprint") for line in lines)


def test_demo_with_images_of_the_user(tmp_path: Path) -> None:
    picture = tmp_path / "mine.png"
    shutil.copy(picture_folder() / "horse.png", picture)
    rows = [line for line in demo(str(picture), str(picture)) if line.endswith(" ms")]
    assert len(rows) == 6
    assert all(row.startswith("mine.png") for row in rows)
