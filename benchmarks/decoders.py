"""Decoded pictures a second: the pool of decoder processes against Pillow alone in one process.

    python -m benchmarks.decoders [--pictures N] [--rounds N]

Real photographs, whole files in sealed memory, hashed and decoded into the ingest region by 1, 2 and 4 processes, all
asked for at once; Pillow opens the same bytes, converts to RGB and copies into memory that it has touched, one after
the other, in this process. All ways are taken in turn, `--rounds` times; the median of a way's rounds counts. Every
picture of the first round is compared with Pillow's. Processor time is that of all processes of a way: other than the
rate, it does not depend on how much of the machine others leave.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import platform
import time
from itertools import cycle, islice
from statistics import median
from typing import Any

import numpy as np
import uvloop
from PIL import Image

from examples.pictures import photographs
from ipc.memory_shm import sealed_copy
from mmcache.keys import KeyHasher
from mmcache.media import IMAGE
from mmcache.server.channel import Poller
from mmcache.server.decode_job import Job
from mmcache.server.decoders import Decoders, Pixels, SharedDescriptor, Supplied
from mmcache.server.ingest import Ingest

NUM_PROCESSES = (1, 2, 4)
SEED = 1
INGEST_BYTES = 384 << 20

Array = np.ndarray[Any, Any]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=140)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    files = [path.read_bytes() for path in photographs()]
    order = list(islice(cycle(range(len(files))), arguments.pictures))
    expected = [by_pillow(data) for data in files]
    megapixels = sum(expected[place].size for place in order) / 3e6
    print(f"{platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} cores, {len(order)} pictures,")
    print(f"{megapixels / len(order):.2f} megapixels each on the mean, {arguments.rounds} rounds")
    ingest = Ingest(INGEST_BYTES)
    pools = {number: make_pool(ingest, number) for number in NUM_PROCESSES}
    try:
        for pool in pools.values():
            await pool.start()
        await measure(pools, ingest, files, order, expected, arguments.rounds)
    finally:
        await asyncio.gather(*(pool.stop(2.0) for pool in pools.values()))
        ingest.close()


async def measure(
    pools: dict[int, Decoders], ingest: Ingest, files: list[bytes], order: list[int], expected: list[Array], rounds: int
) -> None:
    walls: dict[int, list[float]] = {number: [] for number in (0, *pools)}
    works: dict[int, list[float]] = {number: [] for number in (0, *pools)}
    for turn in range(rounds):
        for number in (0, *pools):
            pids = pools[number].pids if number else []
            began, worked = time.perf_counter(), processor_seconds(pids)
            if number:
                await pooled(pools[number], ingest, files, order, expected if turn == 0 else None)
            else:
                pillow_alone(files, order, expected)
            if turn > 0:  # the first is for warmth, and compares
                walls[number].append(time.perf_counter() - began)
                works[number].append(processor_seconds(pids) - worked)
    show(walls, works, len(order))


def show(walls: dict[int, list[float]], works: dict[int, list[float]], num_pictures: int) -> None:
    alone = num_pictures / median(walls[0])
    for number, seconds in walls.items():
        rate = num_pictures / median(seconds)
        spread = f"{num_pictures / max(seconds):.0f} to {num_pictures / min(seconds):.0f}"
        work_ms = median(works[number]) / num_pictures * 1e3
        what = f"{number} processes" if number else "Pillow alone"
        print(
            f"{what:<13} {rate:>6.1f} pictures/s ({spread}), {rate / alone:.2f} of Pillow alone; {work_ms:.2f} ms each"
        )


def processor_seconds(pids: list[int]) -> float:
    """Of this process and others, since they began."""
    ticks = 0
    for pid in pids:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            ticks += sum(map(int, stat.read().rsplit(")", 1)[1].split()[11:13]))
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def make_pool(ingest: Ingest, num_processes: int) -> Decoders:
    poller = Poller(asyncio.get_running_loop())
    return Decoders(poller, ingest, SEED, 100_000_000, "exif", 60.0, num_processes=num_processes)


def by_pillow(data: bytes) -> Array:
    with Image.open(io.BytesIO(data)) as opened:
        return np.asarray(opened.convert("RGB"))


def pillow_alone(files: list[bytes], order: list[int], expected: list[Array]) -> None:
    targets = [array.copy() for array in expected]
    for place in order:
        np.copyto(targets[place], by_pillow(files[place]))


async def pooled(
    pool: Decoders, ingest: Ingest, files: list[bytes], order: list[int], expected: list[Array] | None
) -> None:
    """Decode all of them; their pixels are compared if there is something to compare with."""
    memories = [SharedDescriptor(sealed_copy("benchmark", [data])[0]) for data in files]
    hasher = KeyHasher(SEED)

    async def one(place: int) -> None:
        item = Supplied(memories[place], "", IMAGE, b"", 0, len(files[place]))
        pixels = await pool.decode(Job(item, hasher.key(IMAGE, b"", files[place])))
        if expected is not None:
            compare(ingest, pixels, expected[place])
        ingest.free(pixels.part)

    await asyncio.gather(*(one(place) for place in order))
    for memory in memories:
        memory.release()


def compare(ingest: Ingest, pixels: Pixels, expected: Array) -> None:
    array = np.frombuffer(ingest.memory(pixels.part), np.uint8).reshape(pixels.height, pixels.width, 3)
    np.testing.assert_array_equal(array, expected)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
