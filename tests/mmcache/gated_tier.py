"""A tier that waits and fails as a test tells it to, and a write behind it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

from mmcache.tiers.base import Entry, Tier, TierError
from mmcache.tiers.tiered import TieredStore
from tests.mmcache.tier_contract import make_entry


class GatedTier(Tier):
    """A tier in memory that fails, or answers only while its gate is open."""

    def __init__(self, name: str = "gated") -> None:
        super().__init__()
        self.name = name
        self.gate = asyncio.Event()
        self.gate.set()
        self.fails = False
        self.asked: list[list[bytes]] = []
        self.held: dict[bytes, tuple[Entry, bytes]] = {}
        self.num_closed = 0

    async def _pass(self) -> None:
        await self.gate.wait()
        if self.fails:
            raise TierError("out of order")

    async def find(self, keys: Sequence[bytes]) -> list[Entry | None]:
        self.asked.append(list(keys))
        await self._pass()
        return [self.held[key][0] if key in self.held else None for key in keys]

    async def read(self, entry: Entry, into: memoryview) -> bool:
        await self._pass()
        if entry.key not in self.held:
            return False
        into[: entry.nbytes] = self.held[entry.key][1]
        return True

    async def put(self, entry: Entry, payload: memoryview) -> None:
        await self._pass()
        self.held[entry.key] = (entry, bytes(payload))

    async def remove(self, keys: Sequence[bytes]) -> None:
        await self._pass()
        for key in keys:
            self.held.pop(key, None)

    async def close(self, timeout_s: float) -> bool:
        self.num_closed += 1
        return True


class Done:
    """Counts calls, and holds that they come from one thread."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.numbers: list[int] = []

    def of(self, number: int) -> Callable[[], None]:
        def done() -> None:
            assert threading.get_ident() == self.thread
            self.numbers.append(number)

        return done


def put_behind(store: TieredStore, number: int, done: Callable[[], None], tokens: int = 300) -> tuple[Entry, bytes]:
    entry, payload = make_entry(number, tokens)
    store.put_behind(
        key=entry.key, namespace=entry.namespace, shape=entry.shape, dtype=entry.dtype, grid_thw=entry.grid_thw,
        encode_seconds=entry.encode_seconds, payload=payload, done=done,
    )  # fmt: skip
    return entry, bytes(payload)
