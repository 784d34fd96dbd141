"""What verification has removed from the store, also while it waits or is being written."""

from __future__ import annotations

import asyncio

from mmcache.keys import ContentKey
from mmcache.tiers.base import Entry
from mmcache.tiers.tiered import TieredStore
from tests.mmcache.gated_tier import Done, GatedTier, put_behind
from tests.mmcache.tier_contract import LONG_S


def test_what_waits_to_be_written_is_removed_too() -> None:
    async def test() -> None:
        tier, done = GatedTier(), Done()
        store = TieredStore([tier], LONG_S, 1 << 20)
        entry, _ = put_behind(store, 1, done.of(1))
        put_behind(store, 2, done.of(2))
        assert await store.remove(entry.key)
        await store.drain(LONG_S)
        assert (sorted(done.numbers), len(tier.held), entry.key in tier.held) == ([1, 2], 1, False)
        assert await store.close(LONG_S)

    asyncio.run(test())


class PuttingTier(GatedTier):
    """Tells when it is given an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = asyncio.Event()

    async def put(self, entry: Entry, payload: memoryview) -> None:
        self.begun.set()
        await super().put(entry, payload)


def test_what_is_being_written_is_removed_afterwards() -> None:
    async def test() -> None:
        tier, done = PuttingTier(), Done()
        store = TieredStore([tier], LONG_S, 1 << 20)
        tier.gate.clear()
        entry, _ = put_behind(store, 1, done.of(1))
        await tier.begun.wait()  # its checksum is taken, and it is in the tier's hands
        removal = asyncio.ensure_future(store.remove(entry.key))
        await asyncio.sleep(0)
        tier.gate.set()
        assert await removal
        await store.drain(LONG_S)
        assert (done.numbers, tier.held) == ([1], {})
        put_behind(store, 1, done.of(3))
        await store.drain(LONG_S)
        assert list(tier.held) == [entry.key], "what comes afterwards is written as ever"
        assert await store.close(LONG_S)

    asyncio.run(test())


def test_a_removal_that_fails_says_so() -> None:
    async def test() -> None:
        tier = GatedTier()
        store = TieredStore([tier], LONG_S, 1 << 20)
        tier.fails = True
        assert not await store.remove(bytes(ContentKey(bytes(16))) * 2)
        assert store.counters()["failed"] == 1
        assert await store.close(LONG_S)

    asyncio.run(test())
