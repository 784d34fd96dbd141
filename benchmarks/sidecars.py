"""A sidecar process for benchmarks: one rank, no store, everything in a temporary folder."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def running_sidecar(**settings: str) -> Iterator[Path]:
    """Its socket, once it is ready; it is ended on leaving. `settings`: besides the defaults of benchmarks."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "mmcache.sock"
        chosen = {
            "state": f"{name}/state", "socket": str(path), "store": "none", "ranks": "1", "pool_bytes": "256MiB",
            "device": "cpu",
        } | settings  # fmt: skip
        flags = [f"--{setting.replace('_', '-')}={value}" for setting, value in chosen.items()]
        command = [sys.executable, "-m", "mmcache", "serve", *flags]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sidecar:
            assert sidecar.stdout is not None
            assert sidecar.stdout.readline()
            try:
                yield path
            finally:
                sidecar.terminate()
