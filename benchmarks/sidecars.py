"""A sidecar process for benchmarks: one rank, no store, everything in a temporary folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ENCODE_MS = "BENCHMARK_ENCODE_MS"


@contextmanager
def running_sidecar(*, encode_ms: float = 0.0, **settings: str) -> Iterator[Path]:
    """Its socket, once it is ready; it is ended on leaving. `settings`: besides the defaults of benchmarks.

    `encode_ms`: its ranks sleep as long instead of encoding a microbatch; 0: they encode.
    """
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "mmcache.sock"
        chosen = {
            "state": f"{name}/state", "socket": str(path), "store": "none", "ranks": "1", "pool_bytes": "256MiB",
            "device": "cpu", "http": "off",
        } | settings  # fmt: skip
        flags = [f"--{setting.replace('_', '-')}={value}" for setting, value in chosen.items()]
        module = "benchmarks.sleeping_sidecar" if encode_ms else "mmcache"
        command = [sys.executable, "-m", module, "serve", *flags]
        environ = os.environ | {ENCODE_MS: str(encode_ms)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as sidecar:
            assert sidecar.stdout is not None
            assert sidecar.stdout.readline()
            try:
                yield path
            finally:
                sidecar.terminate()
