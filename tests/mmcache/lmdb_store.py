"""A file store for tests of the LMDB tier."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mmcache.tiers.lmdb import LmdbTier
from tests.mmcache.tier_contract import LONG_S, make_entry

MAP_BYTES = 16 << 20


@contextmanager
def open_store(folder: Path, map_bytes: int = MAP_BYTES) -> Iterator[tuple[LmdbTier, asyncio.Runner]]:
    with asyncio.Runner() as runner:
        tier = runner.run(LmdbTier.open(folder / "store.lmdb", map_bytes))
        try:
            yield tier, runner
        finally:
            runner.run(tier.close(LONG_S))


def fill(folder: Path, num_entries: int = 60) -> None:
    async def put_all(tier: LmdbTier) -> None:
        for number in range(num_entries):
            await tier.put(*make_entry(number))

    with open_store(folder) as (tier, runner):
        runner.run(put_all(tier))
