"""A pool hit through the client, from bytes to lease, against a separate sidecar process.

    python -m benchmarks.hit_path [--rounds N]

Prints medians and 99th percentiles of: one 0.8 MB JPEG given as bytes, hashing included, and 32 such items in one
request, both until the last lease is there; hashing alone and releasing, taken in turn with them; and a bare asyncio
echo in the same run, as the floor of one round trip through an event loop.
"""

from __future__ import annotations

import argparse
import io
import os
import platform
import socket
import statistics
import subprocess
import sys
import time

import mmcache
from benchmarks.sidecars import running_sidecar
from examples.pictures import picture_folder

ITEM_BYTES = 800_000
NUM_ITEMS = 32

ECHO = """
import asyncio, socket, sys
async def main():
    done = asyncio.Event()
    class Echo(asyncio.Protocol):
        def connection_made(self, transport): self.transport = transport
        def data_received(self, data): self.transport.write(data)
        def connection_lost(self, error): done.set()
    await asyncio.get_running_loop().create_connection(Echo, sock=socket.socket(fileno=int(sys.argv[1])))
    await done.wait()
asyncio.run(main())
"""


def photographs(num: int) -> list[bytes]:
    """JPEG files of about 0.8 MB that differ in content."""
    from PIL import Image

    files = []
    with Image.open(picture_folder() / "hubble_deep_field.jpg") as picture:
        for turn in range(num):
            tile = picture.convert("RGB").rotate(turn, expand=False)
            quality = next(q for q in range(100, 5, -1) if len(jpeg(tile, q)) <= ITEM_BYTES)
            files.append(jpeg(tile, quality).ljust(ITEM_BYTES, b"\0"))
    return files


def jpeg(picture: object, quality: int) -> bytes:
    data = io.BytesIO()
    picture.save(data, "JPEG", quality=quality)  # type: ignore[attr-defined]
    return data.getvalue()


def show(name: str, times: list[float], per: int = 1) -> float:
    median = statistics.median(times) / per
    p99 = statistics.quantiles(times, n=100)[98] / per
    print(f"{name:<58} median {median:8.1f} µs   p99 {p99:8.1f} µs")
    return median


def echo(rounds: int, num_bytes: int) -> list[float]:
    """Round trips of `num_bytes` through another process's asyncio loop."""
    ours, theirs = socket.socketpair()
    with ours, theirs, subprocess.Popen([sys.executable, "-c", ECHO, str(theirs.fileno())], pass_fds=[theirs.fileno()]):
        theirs.close()
        data = bytes(num_bytes)
        times = []
        for _ in range(rounds):
            started = time.perf_counter()
            ours.sendall(data)
            left = num_bytes
            while left:
                left -= len(ours.recv(left))
            times.append((time.perf_counter() - started) * 1e6)
        ours.close()
    return times[rounds // 10 :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3000)
    rounds = parser.parse_args().rounds
    cores = len(os.sched_getaffinity(0))
    print(f"{platform.processor() or platform.machine()}, {cores} cores, Python {platform.python_version()}")
    files = photographs(NUM_ITEMS)
    with running_sidecar() as path, mmcache.connect(path) as client:
        measure(client, files, rounds)


def measure(client: mmcache.Client, files: list[bytes], rounds: int) -> None:
    for lease in client.encode(files):
        lease.release()
    floor = show("asyncio echo of 100 bytes, another process", echo(rounds, 100))
    hit_1, beyond_1 = measure_hits(client, files[:1], rounds)
    _, beyond_32 = measure_hits(client, files, rounds // 10)
    print(f"1 item: {hit_1:.1f} µs (bar 150); beyond hashing {beyond_1 / floor:.2f} × a bare asyncio round trip")
    print(f"32 items: {beyond_32:.1f} µs an item beyond hashing (bar 8)")


def measure_hits(client: mmcache.Client, files: list[bytes], rounds: int) -> tuple[float, float]:
    """Microseconds an item of a pool hit, and of what it takes beyond hashing the same items right before."""
    hashing, hits, releasing = [], [], []
    for turn in range(rounds + rounds // 10):
        t0 = time.perf_counter()
        for file in files:
            client.key(file)
        t1 = time.perf_counter()
        leases = client.encode(files)
        t2 = time.perf_counter()
        for lease in leases:
            lease.release()
        t3 = time.perf_counter()
        assert all(lease.origin == "pool" for lease in leases), "a miss was timed"
        if turn >= rounds // 10:
            hashing.append((t1 - t0) * 1e6)
            hits.append((t2 - t1) * 1e6)
            releasing.append((t3 - t2) * 1e6)
    num = len(files)
    each = "" if num == 1 else ", per item"
    show(f"hash {num} × 0.8 MB{each}", hashing, num)
    hit = show(f"pool hit, {num} × 0.8 MB as bytes, hashing included{each}", hits, num)
    show(f"release{each}", releasing, num)
    beyond = [hit - alone for hit, alone in zip(hits, hashing, strict=True)]
    return hit, show(f"pool hit beyond hashing{each}", beyond, num)


if __name__ == "__main__":
    main()
