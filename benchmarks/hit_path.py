"""A pool hit through the client, from bytes to lease, against a separate sidecar process.

    python -m benchmarks.hit_path [--rounds N]

Prints medians and 99th percentiles of: hashing alone; one 0.8 MB JPEG given as bytes, hashing included; 32 such items
in one request, beyond their hashing, per item; and a bare asyncio echo of the same frames in the same run, as the
floor of one round trip through an event loop.
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
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import mmcache
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


def timed(call: Callable[[], object], rounds: int) -> list[float]:
    """Microseconds of each call, after a tenth of the rounds as warm-up."""
    times = []
    for turn in range(rounds + rounds // 10):
        started = time.perf_counter()
        call()
        if turn >= rounds // 10:
            times.append((time.perf_counter() - started) * 1e6)
    return times


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

        def call() -> None:
            ours.sendall(data)
            left = num_bytes
            while left:
                left -= len(ours.recv(left))

        times = timed(call, rounds)
        ours.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3000)
    rounds = parser.parse_args().rounds
    cores = len(os.sched_getaffinity(0))
    print(f"{platform.processor() or platform.machine()}, {cores} cores, Python {platform.python_version()}")
    files = photographs(NUM_ITEMS)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "mmcache.sock"
        flags = (f"--state={name}/state", f"--socket={path}", "--store=none", "--ranks=1", "--pool-bytes=256MiB")
        command = [sys.executable, "-m", "mmcache", "serve", *flags]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sidecar:
            assert sidecar.stdout is not None
            assert sidecar.stdout.readline()
            with mmcache.connect(path) as client:
                measure(client, files, rounds)
            sidecar.terminate()


def measure(client: mmcache.Client, files: list[bytes], rounds: int) -> None:
    for lease in client.encode(files):
        lease.release()

    def hit(items: list[bytes]) -> None:
        for lease in client.encode(items):
            lease.release()

    floor = show("asyncio echo of 100 bytes, another process", echo(rounds, 100))
    hash_1 = show("hash 1 × 0.8 MB", timed(lambda: client.key(files[0]), rounds))
    hit_1 = show("pool hit, 1 × 0.8 MB as bytes, hashing included", timed(lambda: hit(files[:1]), rounds))
    few = rounds // 10
    hash_32 = show("hash 32 × 0.8 MB, per item", timed(lambda: [client.key(f) for f in files], few), NUM_ITEMS)
    hit_32 = show("pool hit, 32 × 0.8 MB in one request, per item", timed(lambda: hit(files), few), NUM_ITEMS)
    ratio = (hit_1 - hash_1) / floor
    print(f"one item: {hit_1:.1f} µs (bar 150); beyond hashing {ratio:.2f} × a bare asyncio round trip")
    print(f"32 items: {hit_32 - hash_32:.1f} µs an item beyond hashing (bar 8)")


if __name__ == "__main__":
    main()
