"""Entries for tests of tiers. It imports little: processes that are made to be killed start fast."""

from __future__ import annotations

import random

from mmcache.keys import checksum
from mmcache.tiers.base import Entry

DIM = 16


def make_entry(number: int, tokens: int = 300, seed: int = 0) -> tuple[Entry, memoryview]:
    """An entry and its payload of `tokens` times 64 bytes, the same for the same arguments."""
    payload = random.Random(f"{number} {tokens} {seed}").randbytes(tokens * DIM * 4)
    entry = Entry(
        key=number.to_bytes(32, "big"),
        namespace=bytes(8),
        shape=(tokens, DIM),
        dtype="float32",
        grid_thw=(1, 2, 2 * tokens),
        nbytes=len(payload),
        checksum=checksum(payload),
        created_s=1_000.0 + number,
        encode_seconds=0.25,
    )
    return entry, memoryview(payload)
