"""The coordinator's own time: processor time of its thread, an item, on misses and on hits.

    python -m benchmarks.coordinator_time [--encode-ms 2] [--kinds arrays,jpegs] [--items 320] [--rounds 12]

A sidecar in a process of its own, tiny pictures, so that decoders have little to do, and ranks that sleep instead of
encoding (`--encode-ms 0`: that encode); the scheduler's account of the coordinator's main thread before and after.
Least and median of the rounds: what else runs on the machine costs a thread its caches.

    miss          calls of 32 items, none of them cached
    hit           the same items again, one call right after the other; what it spends polling for the next is in it
    hit, paused   the same with a pause of 2 ms after each call, so that each has to wake it up
    idle          what it takes a second when nothing is asked for: 50 wake-ups that do nothing but look at the clock
"""

from __future__ import annotations

import argparse
import io
import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import mmcache
from benchmarks.sidecars import running_sidecar

BATCH = 32
SIDE = 28
PAUSE_S = 2e-3
IDLE_S = 2.0
BARS_US = {"miss": 100, "hit": 3, "hit, paused": 3}

Items = Sequence[Any]


def arrays(draw: np.random.Generator, count: int) -> Items:
    """Pictures as pixels."""
    return list(draw.integers(0, 256, (count, SIDE, SIDE, 3), np.uint8))


def jpegs(draw: np.random.Generator, count: int) -> Items:
    """Pictures as files."""
    files = []
    for picture in arrays(draw, count):
        buffer = io.BytesIO()
        Image.fromarray(picture).save(buffer, "JPEG")
        files.append(buffer.getvalue())
    return files


KINDS: dict[str, Callable[[np.random.Generator, int], Items]] = {"arrays": arrays, "jpegs": jpegs}


class Measured:
    """Microseconds that the main thread of a process has run, for each of so many items, by what was done."""

    def __init__(self, pid: int) -> None:
        self._schedstat = Path(f"/proc/{pid}/task/{pid}/schedstat")
        self.own_us: defaultdict[str, list[float]] = defaultdict(list)
        self.passed_us: defaultdict[str, list[float]] = defaultdict(list)

    def __call__(self, what: str, count: float, work: Callable[[], None]) -> None:
        """Do it, and account for it."""
        before, began = self._ran_us(), time.perf_counter()
        work()
        self.own_us[what].append((self._ran_us() - before) / count)
        self.passed_us[what].append((time.perf_counter() - began) / count * 1e6)

    def _ran_us(self) -> float:
        return int(self._schedstat.read_text().split()[0]) / 1e3

    def show(self, kind: str) -> None:
        """A line for each of what was done."""
        for what, own in self.own_us.items():
            bar = f"bar {BARS_US[what]}" if what in BARS_US else ""
            least, middle, passed = min(own), statistics.median(own), statistics.median(self.passed_us[what])
            print(f"{kind:8}{what:12}{least:9.2f} least{middle:9.2f} median{passed:10.1f} passed  {bar}", flush=True)


def call(client: mmcache.Client, items: Items, keys: Sequence[mmcache.ContentKey], pause_s: float = 0.0) -> None:
    """Encode everything, in calls of `BATCH`, and release it."""
    for start in range(0, len(keys), BATCH):
        part = slice(start, start + BATCH)
        for lease in client.encode(items[part], keys=keys[part]):
            lease.release()
        if pause_s:
            time.sleep(pause_s)


def measure(kind: str, options: argparse.Namespace) -> None:
    """All rounds with one kind of items, on a sidecar of their own."""
    draw = np.random.default_rng(5)
    with (
        running_sidecar(encode_ms=options.encode_ms) as path,
        mmcache.connect(path, timeout=300) as client,
    ):
        measured = Measured(client.stats()["pid"])
        for _ in range(options.rounds):
            items = KINDS[kind](draw, options.items)
            keys = [client.key(item) for item in items]
            nothing = [None] * len(keys)
            measured("miss", len(keys), lambda: call(client, items, keys))  # noqa: B023  # called at once
            measured("hit", len(keys), lambda: call(client, nothing, keys))  # noqa: B023
            measured("hit, paused", len(keys), lambda: call(client, nothing, keys, PAUSE_S))  # noqa: B023
        measured("idle", IDLE_S, lambda: time.sleep(IDLE_S))
        batches = client.stats()["batches"]
    measured.show(kind)
    print(f"{kind:8}{batches['items'] / batches['begun']:.1f} items a microbatch", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=320)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--encode-ms", type=float, default=2.0)
    parser.add_argument("--kinds", default=",".join(KINDS))
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    print(f"{platform.processor() or platform.machine()}, {cores} cores, Python {platform.python_version()}")
    print("µs an item; idle: µs a second")
    for kind in options.kinds.split(","):
        measure(kind, options)


if __name__ == "__main__":
    main()
