"""Pool hits through the client, keys given, against a separate sidecar process: latency, and hits a second.

    python -m benchmarks.hits [--rounds N] [--seconds S]

Prints median and 99th percentile of a call of 1 and of 32 items until the last lease is there (releasing apart), a bare
asyncio echo in the same run, and hits a second of 1, 2, 4 and 8 client processes that ask for 1 and for 32 items at a
time. Every lease is released; one in a hundred is read through its view, which has to lie in the pool's mapping.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import mmcache
from benchmarks.hit_path import echo, show
from benchmarks.sidecars import running_sidecar

NUM_KEYS = 32

WORKER = """
import sys, time
import mmcache
path, size, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
keys = [mmcache.ContentKey.from_hex(text) for text in sys.argv[4].split(",")]
with mmcache.connect(path) as client:
    nothing = [None] * size
    print("ready", flush=True)
    sys.stdin.readline()
    end, done, turn = time.monotonic() + seconds, 0, 0
    while time.monotonic() < end:
        start = turn * size % len(keys)
        for lease in client.encode(nothing, keys=keys[start : start + size]):
            lease.release()
        done += size
        turn += 1
    print(done, flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument("--seconds", type=float, default=3.0)
    arguments = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    print(f"{platform.processor() or platform.machine()}, {cores} cores, Python {platform.python_version()}")
    with running_sidecar() as path:
        keys = fill(path)
        latency(path, keys, arguments.rounds)
        for size in (1, NUM_KEYS):
            for num_clients in (1, 2, 4, 8):
                rate = throughput(path, keys, size, num_clients, arguments.seconds)
                print(f"{num_clients} clients, {size:>2} items a call: {rate:>9,.0f} hits a second")


def fill(path: Path) -> list[mmcache.ContentKey]:
    pictures = [np.random.default_rng(seed).integers(0, 256, (56, 84, 3), np.uint8) for seed in range(NUM_KEYS)]
    with mmcache.connect(path) as client:
        for lease in client.encode(pictures):
            lease.release()
        return [client.key(picture) for picture in pictures]


def latency(path: Path, keys: list[mmcache.ContentKey], rounds: int) -> None:
    with mmcache.connect(path) as client:
        show("asyncio echo of 100 bytes, another process", echo(rounds, 100))
        for size in (1, NUM_KEYS):
            hits, releasing = [], []
            wanted, nothing = keys[:size], [None] * size
            for turn in range(rounds + rounds // 10):
                started = time.perf_counter()
                leases = client.encode(nothing, keys=wanted)
                got = time.perf_counter()
                for lease in leases:
                    lease.release()
                done = time.perf_counter()
                if turn >= rounds // 10:
                    hits.append((got - started) * 1e6)
                    releasing.append((done - got) * 1e6)
                if turn % 100 == 0:
                    check_in_place(client, keys[0])
            each = "" if size == 1 else ", per item"
            show(f"pool hit, {size} keys given{each}", hits, size)
            show(f"release{each}", releasing, size)
        print("bars: 60 µs for 1 item, 4 µs an item at 32")


def check_in_place(client: mmcache.Client, key: mmcache.ContentKey) -> None:
    """The view's bytes lie in the mapping of the pool, and its values are no copy."""
    with client.encode([None], keys=[key])[0] as lease:
        address = lease.numpy().__array_interface__["data"][0]
        with open("/proc/self/maps", encoding="ascii") as maps:
            ranges = [line.split() for line in maps if "mmcache-pool" in line]
        bounds = [tuple(int(end, 16) for end in fields[0].split("-")) for fields in ranges]
        assert any(start <= address < end for start, end in bounds), "the embedding was copied"


def throughput(path: Path, keys: list[mmcache.ContentKey], size: int, num_clients: int, seconds: float) -> float:
    command = [sys.executable, "-c", WORKER, str(path), str(size), str(seconds), ",".join(map(str, keys))]
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(num_clients)
    ]
    for worker in workers:
        assert worker.stdout is not None
        worker.stdout.readline()
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    total = 0
    for worker in workers:
        assert worker.stdout is not None
        total += int(worker.stdout.readline())
        worker.communicate()
    return total / seconds


if __name__ == "__main__":
    main()
