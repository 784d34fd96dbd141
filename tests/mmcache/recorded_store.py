"""File stores as releases have written them: `python -m tests.mmcache.recorded_store` records that of this one."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import struct
from pathlib import Path

from mmcache.keys import checksum
from mmcache.tiers.base import Entry
from mmcache.tiers.codec import FORMAT_VERSION
from mmcache.tiers.lmdb import LmdbTier
from tests.mmcache.entries import make_entry

DATA = Path(__file__).parents[1] / "data"
CHUNK_BYTES = 4080


def recorded_file(version: int) -> Path:
    return DATA / f"store-format-{version}.lmdb"


def recorded_entries() -> list[tuple[Entry, bytes]]:
    """What every recorded file holds: float32 in one chunk, bfloat16 in several, of two models and namespaces."""
    floats, payload = make_entry(1, tokens=30)
    floats = dataclasses.replace(floats, key=bytes(range(32)), namespace=b"demo ns.", created_s=1.75e9)
    draw = random.Random(5)
    halves = b"".join(struct.pack("<f", draw.gauss(0, 1))[2:] for _ in range(120 * 64))
    others = Entry(
        key=bytes(range(100, 132)), namespace=bytes(8), shape=(120, 64), dtype="bfloat16", grid_thw=(1, 20, 24),
        nbytes=len(halves), checksum=checksum(halves), created_s=1.75e9 + 0.5, encode_seconds=0.003,
    )  # fmt: skip
    return [(floats, bytes(payload)), (others, halves)]


async def record(path: Path) -> None:
    tier = await LmdbTier.open(path, 1 << 20, chunk_bytes=CHUNK_BYTES)
    for entry, payload in recorded_entries():
        await tier.put(entry, memoryview(payload))
    assert await tier.close(30.0)


if __name__ == "__main__":
    asyncio.run(record(recorded_file(FORMAT_VERSION)))
