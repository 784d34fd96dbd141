"""Processes that read a sidecar's pool on a CUDA device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from tests.mmcache.support import SidecarProcess, clean_environ

ON_CUDA = {"device": "cuda", "ranks": "1", "pool_bytes": "64MiB", "dtype": "float32"}


def sidecar_on_cuda(folder: Path, **settings: str) -> SidecarProcess:
    folder.mkdir(exist_ok=True)
    return SidecarProcess(folder, **(ON_CUDA | settings))


def run_client(sidecar: SidecarProcess, code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a process of its own, with `client` connected and torch imported."""
    return subprocess.run(
        [sys.executable, "-c", PREAMBLE + code, str(sidecar.socket)], capture_output=True, text=True, timeout=120,
        env=clean_environ(PYTHONPATH=_paths(), **environ), check=False,
    )  # fmt: skip


def start_client(sidecar: SidecarProcess, code: str, log: Path, *arguments: str) -> subprocess.Popen[str]:
    """The same, without waiting; what it prints is in `log` with .out and .err."""
    return subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + code, str(sidecar.socket), *arguments],
        stdout=log.with_suffix(".out").open("w"), stderr=log.with_suffix(".err").open("w"), text=True,
        env=clean_environ(PYTHONPATH=_paths()),
    )  # fmt: skip


def busy(stream: torch.cuda.Stream, seconds: float = 0.5) -> None:
    """Queue work of about that long."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(int(seconds * 1.9e9))


def bytes_used() -> int:
    """Of the device, by all processes."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def _paths() -> str:
    return ":".join(path for path in sys.path if path) + ":."


PREAMBLE = """
import sys, time
import numpy as np
import torch
import mmcache
from tests.mmcache.support import image
client = mmcache.connect(sys.argv[1])
"""
