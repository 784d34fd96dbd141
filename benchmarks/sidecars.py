"""A sidecar process for benchmarks: one CPU rank, no store, everything in a temporary folder."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def running_sidecar() -> Iterator[Path]:
    """Its socket, once it is ready; it is ended on leaving."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "mmcache.sock"
        flags = (f"--state={name}/state", f"--socket={path}", "--store=none", "--ranks=1", "--pool-bytes=256MiB")
        command = [sys.executable, "-m", "mmcache", "serve", *flags]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sidecar:
            assert sidecar.stdout is not None
            assert sidecar.stdout.readline()
            try:
                yield path
            finally:
                sidecar.terminate()
