"""The coordinator's own time: processor time of its thread, an item, on misses and on hits.

    python -m benchmarks.coordinator_time [--items 2000]

A sidecar in a process of its own, tiny pictures, so that decoders and ranks have little to do; the scheduler's account
of the coordinator's main thread before and after. What it spends polling for the next frame of a call is in it.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from pathlib import Path

import numpy as np

import mmcache
from benchmarks.sidecars import running_sidecar

BATCH = 32
BAR_MISS_US, BAR_HIT_US = 100, 3


def thread_seconds(pid: int) -> float:
    """Seconds that a process's main thread has run."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    print(f"{platform.processor() or platform.machine()}, {cores} cores, Python {platform.python_version()}")
    draw = np.random.default_rng(5)
    with running_sidecar() as path, mmcache.connect(path, timeout=300) as client:
        pid = client.stats()["pid"]
        for turn in range(options.rounds):
            pictures = list(draw.integers(0, 256, (options.items, 28, 28, 3), np.uint8))
            keys = [client.key(picture) for picture in pictures]
            shown = [f"round {turn}:"]
            for name, bar, items in (("miss", BAR_MISS_US, pictures), ("hit", BAR_HIT_US, [None] * len(keys))):
                before, began = thread_seconds(pid), time.perf_counter()
                for start in range(0, len(keys), BATCH):
                    part = slice(start, start + BATCH)
                    for lease in client.encode(items[part], keys=keys[part]):
                        lease.release()
                spent = (thread_seconds(pid) - before) / len(keys) * 1e6
                passed = (time.perf_counter() - began) / len(keys) * 1e6
                shown.append(f"{name} {spent:6.1f} µs an item (bar {bar}), {passed:6.1f} passed;")
            print(*shown, flush=True)


if __name__ == "__main__":
    main()
