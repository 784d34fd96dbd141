"""Client processes for tests of staging, and what those look at."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.mmcache.support import SidecarProcess, clean_environ

CONSUMER = """
import json, sys
import mmcache
from mmcache.keys import checksum
with mmcache.connect(sys.argv[1]) as client:
    for line in sys.stdin:
        refs = [mmcache.StagedRef.of(values) for values in json.loads(line)]
        leases = client.encode(refs)
        print(json.dumps([checksum(lease.numpy()) for lease in leases]), flush=True)
        for lease in leases:
            lease.release()
"""


def child(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=clean_environ(PYTHONPATH="."),
    )  # fmt: skip


def told(process: subprocess.Popen[str], line: object) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(line) + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def staging(sidecar: SidecarProcess) -> dict[str, int]:
    found: dict[str, int] = sidecar.stats()["staging"]
    return found


def is_idle(sidecar: SidecarProcess) -> bool:
    stats = sidecar.stats()
    return not (stats["staging"]["bytes_used"] or stats["leases"]["active"] or stats["pool"]["bytes_leased"])
