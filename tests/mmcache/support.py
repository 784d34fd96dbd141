"""Real sidecar processes for the tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np

import mmcache
from mmcache.framing import Kind, OutgoingFrame, pack_frame
from mmcache.records import ENCODE_HEAD, KEY_BYTES

MMCACHE = [sys.executable, "-m", "mmcache"]
SMALL = {"pool_bytes": "32MiB", "ingest_bytes": "32MiB", "ranks": "1", "store": "none"}


def clean_environ(**more: str) -> dict[str, str]:
    """The environment without anything that would set a setting, but for the one port that all sidecars would want."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MMCACHE_")}
    return kept | {"MMCACHE_HTTP": "off"} | more


def flags_of(settings: dict[str, str]) -> list[str]:
    """Settings as flags of `mmcache serve`."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]


class SidecarProcess:
    """`mmcache serve` with its state and socket in `folder`, small unless told otherwise."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder = folder
        self.socket = folder / "mmcache.sock"
        chosen = SMALL | {"state": str(folder / "state"), "socket": str(self.socket)} | settings
        self._command = [*MMCACHE, "serve", *flags_of(chosen)]
        self.process: subprocess.Popen[str] | None = None
        self.ready_line = ""

    def start(self) -> Self:
        self.launch()
        return self.wait_ready()

    def launch(self) -> None:
        """Start it without waiting until it is ready."""
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=(self.folder / "log").open("a"), text=True,
            env=clean_environ(), start_new_session=True,
        )  # fmt: skip

    def wait_ready(self) -> Self:
        assert self.process is not None
        assert self.process.stdout is not None
        self.ready_line = self.process.stdout.readline()
        assert " ready on " in self.ready_line, self.log()
        return self

    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def connect(self, **arguments: Any) -> mmcache.Client:
        return mmcache.connect(self.socket, **arguments)

    def stats(self) -> dict[str, Any]:
        with self.connect() as client:
            return client.stats()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout_s: float = 30) -> int:
        assert self.process is not None
        status = self.process.wait(timeout_s)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status

    def stop(self) -> int:
        self.send_signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        self.wait()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.stop()


def encode_frame(keys: bytes, timeout_ms: int = 60_000, request_id: int = 1, priority: int = 0) -> OutgoingFrame:
    """An ENCODE that no client would send: for keys end to end."""
    head = ENCODE_HEAD.pack(request_id, timeout_ms, request_id, len(keys) // KEY_BYTES, 0, 0, priority)
    return pack_frame(Kind.ENCODE, None, head + keys)


def eventually(is_true: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Wait for a condition; the bound is for a loaded machine and asserts no speed."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)


def image(seed: int, height: int = 56, width: int = 84) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A picture that no other seed gives."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
