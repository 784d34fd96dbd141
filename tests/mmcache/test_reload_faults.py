"""Models that nobody should ask for, on a real sidecar: every one is an error, and no rank is lost by it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import mmcache
from encoder.config import EncoderConfig
from tests.mmcache.support import MMCACHE, SidecarProcess, clean_environ, eventually, image
from tests.mmcache.weights import CONFIG, settings_of, write_checkpoint

ROOT = str(Path(mmcache.__file__).parents[1])


def run(*arguments: str | bytes, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MMCACHE, *arguments], capture_output=True, text=True, timeout=120, check=False,
        env=clean_environ(PYTHONPATH=ROOT, **environ),
    )  # fmt: skip


class Folders:
    """Checkpoints with one thing wrong."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def new(self, **options: Any) -> Path:
        self._count += 1
        return write_checkpoint(self._folder / f"model-{self._count}", 2, **options)

    def with_config(self, text: str) -> Path:
        folder = self.new()
        (folder / "config.json").write_text(text)
        return folder

    def with_setting(self, **vision: object) -> Path:
        settings = settings_of(CONFIG)
        settings["vision_config"].update(vision)
        return self.with_config(json.dumps(settings))

    def with_tensors(self, **changes: torch.Tensor) -> Path:
        folder = self.new()
        save_file({**load_file(folder / "model.safetensors"), **changes}, folder / "model.safetensors")
        return folder

    def with_pipe(self) -> Path:
        folder = self.new()
        (folder / "model.safetensors").unlink()
        os.mkfifo(folder / "model.safetensors")
        return folder


def test_bad_models_cost_no_rank(tmp_path: Path) -> None:
    make = Folders(tmp_path)
    many = {f"vision_tower.{'x' * 60}{number}": torch.zeros(1) for number in range(20_000)}
    wrong_settings = [
        "/tmp/" + "a" * 300,
        "~no-such-user/x",
        "a\0b",
        make.with_config("[" * 200_000),
        make.with_setting(projector_ln_eps=10**400),
        make.with_setting(vt_intermediate_size=10**400),
        make.with_setting(vt_num_hidden_layers=10**7),
        make.with_setting(init_pos_emb_time=1),
        make.with_setting(**{"\ud800": 1}),
        make.new(processor={"in_patch_limit": 10**400}),
    ]
    wrong_tensors = [make.with_tensors(**many), make.with_pipe()]
    good = make.new()
    with SidecarProcess(tmp_path, model=str(good)) as sidecar, sidecar.connect(timeout=60) as client:
        client.encode([image(1)])[0].release()
        ranks = client.stats()["ranks"]
        for model in wrong_settings:
            with pytest.raises(mmcache.ConfigError, match="model = "):
                client.reload(model)
        for model in wrong_tensors:
            with pytest.raises(mmcache.CheckpointError, match="model = ") as caught:
                client.reload(model)
            assert len(str(caught.value)) <= 4000
        with pytest.raises(mmcache.CheckpointError, match=r"and 199.. more"):
            client.reload(wrong_tensors[0])
        assert client.stats()["ranks"] == ranks
        with client.encode([image(1)])[0] as lease:
            assert lease.origin == "pool"
        assert "Traceback" not in sidecar.log()


def test_weights_that_are_cut_while_they_are_read(tmp_path: Path) -> None:
    """Over and over, with a file that takes a while: whatever the moment, the rank lives."""
    large = EncoderConfig(hidden_size=512, num_layers=16, num_heads=4, mlp_size=2048, text_width=64)
    served = write_checkpoint(tmp_path / "served", 1)
    cut = write_checkpoint(tmp_path / "cut", 2, large)
    file = cut / "model.safetensors"
    os.link(file, tmp_path / "whole")
    with SidecarProcess(tmp_path, model=str(served)) as sidecar, sidecar.connect(timeout=60) as client:
        ranks = client.stats()["ranks"]
        for delay_s in (0.01, 0.03, 0.06, 0.1, 0.15):
            file.unlink()
            file.write_bytes((tmp_path / "whole").read_bytes())
            timer = threading.Timer(delay_s, os.truncate, (file, 4096))
            timer.start()
            with suppress(mmcache.CheckpointError):
                client.reload(cut)
            timer.join()
        with pytest.raises(mmcache.CheckpointError, match="cut"):
            client.reload(cut)
        assert client.stats()["ranks"] == ranks


def test_names_that_no_model_has(tmp_path: Path) -> None:
    """Refused by the client, before anything is sent; the command's status says that the call was wrong."""
    with SidecarProcess(tmp_path) as sidecar, sidecar.connect() as client:
        for name in ("", "a" * 5000, "/tmp" + "/a" * 3000, "\udc80", "\ud800"):
            with pytest.raises(mmcache.ConfigError, match="model = "):
                client.reload(name)
        assert client.reload("moonvit-tiny") == client.fingerprint, "the connection is as it was"
        for argument in (b"", b"a" * 5000, b"\x80"):
            done = run("reload", f"--socket={sidecar.socket}", "--model", argument)
            assert (done.returncode, done.stdout) == (2, "")
            assert done.stderr.startswith("mmcache: model = ")
            assert len(done.stderr.splitlines()) == 1
        code = "import os, sys, mmcache\nos.mkdir('x'); os.chdir('x'); os.rmdir('../x')\n"
        code += "mmcache.connect(sys.argv[1]).reload('y')"
        done = subprocess.run(
            [sys.executable, "-c", code, sidecar.socket], capture_output=True, text=True, cwd=tmp_path, check=False,
            env=clean_environ(PYTHONPATH=ROOT),
        )  # fmt: skip
        assert "ConfigError: model = y: the current folder cannot be found" in done.stderr


def test_exit_statuses_of_a_wrong_checkpoint(tmp_path: Path) -> None:
    """README: 2 for what the settings show, 1 for what loading shows; serve and reload agree."""
    make = Folders(tmp_path)
    wrong_settings = [make.with_config("{"), make.with_setting(init_pos_emb_time=1), tmp_path / "missing"]
    wrong_index = make.new(num_shards=2)
    (wrong_index / "model.safetensors.index.json").write_text('{"weight_map": {"mm_projector.proj.0.bias": 5}}')
    wrong_tensors = [make.with_tensors(**{"vision_tower.x": torch.zeros(1)}), wrong_index]
    expected = {**dict.fromkeys(wrong_settings, 2), **dict.fromkeys(wrong_tensors, 1)}
    with SidecarProcess(tmp_path, model=str(make.new())) as sidecar:
        other = [f"--state={tmp_path}/other", f"--socket={tmp_path}/other.sock", "--ranks=1", "--store=none"]
        small = ["--pool-bytes=1MiB", "--ingest-bytes=1MiB"]
        for model, status in expected.items():
            for command in (["reload", f"--socket={sidecar.socket}"], ["serve", *other, *small]):
                done = run(*command, "--model", str(model))
                assert (done.returncode, done.stdout) == (status, ""), (command[0], model, done.stderr)
                assert "mmcache: model = " in done.stderr
                assert "Traceback" not in done.stderr


class ImpatientSidecar(SidecarProcess):
    """One that gives a rank a second to load a model."""

    def __init__(self, folder: Path, **settings: str) -> None:
        super().__init__(folder, **settings)
        code = (
            "import mmcache.server.ranks as ranks; ranks.LOAD_TIMEOUT_S = 1.0; import mmcache.cli; mmcache.cli.main()"
        )
        self._command = [sys.executable, "-c", code, *self._command[len(MMCACHE) :]]


def test_a_load_that_takes_for_ever(tmp_path: Path) -> None:
    a, b = write_checkpoint(tmp_path / "a", 1), write_checkpoint(tmp_path / "b", 2)
    with ImpatientSidecar(tmp_path, model=str(a), ranks="2") as sidecar, sidecar.connect() as client:
        before = client.fingerprint
        (victim, other) = client.stats()["ranks"]["pids"]
        os.kill(victim, signal.SIGSTOP)
        with pytest.raises(mmcache.SidecarError, match="it did not load a model within 1 s"):
            client.reload(b)
        assert client.fingerprint == before
        eventually(lambda: client.stats()["ranks"]["ready"] == 2, "it is replaced, with the old model")
        stats = client.stats()
        assert (stats["fingerprint"], stats["model"]) == (str(before), str(a))
        assert victim not in stats["ranks"]["pids"]
        assert other in stats["ranks"]["pids"]
        assert "is lost: it did not load a model within 1 s" in sidecar.log()


def test_ctrl_c_while_a_command_is_imported(tmp_path: Path) -> None:
    """A `click` that takes for ever to import stands for a slow disk."""
    (tmp_path / "click").mkdir()
    (tmp_path / "click" / "__init__.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    environ = clean_environ(PYTHONPATH=f"{tmp_path}:{ROOT}")
    with subprocess.Popen(
        # A shell's background jobs ignore Ctrl-C.
        ["env", "--default-signal=INT", *MMCACHE, "stats"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ, cwd=tmp_path,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "")
