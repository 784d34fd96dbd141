"""The tiers as the coordinator sees them: bounded, counted, never an error."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from mmcache.tiers.base import Entry, LeftBehindError
from mmcache.tiers.lmdb import LmdbTier
from mmcache.tiers.tiered import TieredStore
from tests.mmcache.gated_tier import Done, GatedTier, put_behind
from tests.mmcache.tier_contract import LONG_S, make_entry

NOW = 1_700_000_000.5


async def read_back(store: TieredStore, entry: Entry) -> bytes | None:
    into = bytearray(entry.nbytes)
    return bytes(into) if await store.read(entry, memoryview(into)) else None


def counted(store: TieredStore, *names: str) -> tuple[Any, ...]:
    counters = store.counters()
    return tuple(counters[name] for name in names)


def on_loop(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(2 * LONG_S):
            await test()

    asyncio.run(bounded())


def test_without_a_tier_everything_is_a_miss() -> None:
    async def test() -> None:
        store, done = TieredStore([], LONG_S, 1 << 20), Done()
        entry, _ = put_behind(store, 1, done.of(1))
        assert done.numbers == [1]
        assert await store.find([entry.key, bytes(32)]) == [None, None]
        assert not await store.read(entry, memoryview(bytearray(entry.nbytes)))
        await store.drain(LONG_S)
        assert await store.close(LONG_S)
        assert counted(store, "misses", "hits", "lost", "dropped", "tiers") == (2, 0, 1, 0, {})

    on_loop(test)


def test_what_is_put_behind_is_found_and_read(tmp_path: Path) -> None:
    async def test() -> None:
        tier = await LmdbTier.open(tmp_path / "store.lmdb", 64 << 20)
        store, done = TieredStore([tier], LONG_S, 1 << 20, clock=lambda: NOW), Done()
        written = [put_behind(store, number, done.of(number)) for number in range(5)]
        assert counted(store, "queued", "queued_bytes") == (5, 5 * 300 * 64)
        await store.drain(LONG_S)
        assert done.numbers == [0, 1, 2, 3, 4]
        found = await store.find([entry.key for entry, _ in written] + [bytes(31) + b"\xff"])
        assert found[5] is None
        for entry, (made, payload) in zip(found[:5], written, strict=True):
            assert entry is not None
            assert (entry.checksum, entry.shape, entry.grid_thw) == (made.checksum, made.shape, made.grid_thw)
            assert (entry.created_s, entry.encode_seconds) == (NOW, made.encode_seconds)
            assert await read_back(store, entry) == payload
        assert counted(store, "hits", "misses", "read", "written", "queued_bytes") == (5, 1, 5, 5, 0)
        tiers = store.counters()["tiers"]
        assert isinstance(tiers, dict)
        assert tiers["lmdb"]["entries"] == 5
        assert await store.close(LONG_S)
        assert await store.close(LONG_S)

    on_loop(test)


def test_a_late_tier_is_a_counted_miss() -> None:
    async def test() -> None:
        tier = GatedTier()
        entry, payload = make_entry(1)
        tier.held[entry.key] = (entry, bytes(payload))
        store = TieredStore([tier], 0.01, 1 << 20)
        tier.gate.clear()
        assert await store.find([entry.key]) == [None]
        into = bytearray(entry.nbytes)
        assert not await store.read(entry, memoryview(into))
        tier.gate.set()
        await asyncio.sleep(0)
        assert not any(into)
        assert counted(store, "late", "failed", "misses", "lost") == (2, 0, 1, 1)
        assert await store.close(LONG_S)

    on_loop(test)


def test_a_failing_tier_is_a_counted_miss_and_recovers(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        tier, done = GatedTier(), Done()
        store = TieredStore([tier], LONG_S, 1 << 20)
        tier.fails = True
        entry, payload = put_behind(store, 1, done.of(1))
        await store.drain(LONG_S)
        assert done.numbers == [1]
        assert await store.find([entry.key]) == [None]
        assert await read_back(store, entry) is None
        assert counted(store, "failed", "write_failed", "written") == (2, 1, 0)
        assert [record.message for record in caplog.records] == [
            "store tier gated: out of order; requests go on without it"
        ]
        tier.fails = False
        put_behind(store, 1, done.of(2))
        await store.drain(LONG_S)
        (found,) = await store.find([entry.key])
        assert found is not None
        assert await read_back(store, found) == payload
        assert await store.close(LONG_S)

    on_loop(test)


def test_a_later_tier_is_asked_only_for_what_is_missing() -> None:
    async def test() -> None:
        first, second = GatedTier("first"), GatedTier("second")
        (one, one_payload), (two, two_payload) = make_entry(1), make_entry(2)
        first.held[one.key] = (one, bytes(one_payload))
        second.held[two.key] = (two, bytes(two_payload))
        store = TieredStore([first, second], LONG_S, 1 << 20)
        assert await store.find([two.key, one.key]) == [two, one]
        assert await store.find([one.key]) == [one]
        assert second.asked == [[two.key]]
        assert await read_back(store, two) == two_payload
        first.fails = True
        assert await store.find([one.key, two.key]) == [None, two]
        assert counted(store, "hits", "misses", "read", "lost", "failed") == (4, 1, 1, 0, 1)
        assert await store.close(LONG_S)
        assert (first.num_closed, second.num_closed) == (1, 1)

    on_loop(test)


def test_a_full_queue_drops_and_counts() -> None:
    async def test() -> None:
        tier, done = GatedTier(), Done()
        tier.gate.clear()
        store = TieredStore([tier], LONG_S, 2 * 300 * 64)
        entries = [put_behind(store, number, done.of(number))[0] for number in range(3)]
        assert done.numbers == [2]
        await store.drain(0.01)
        assert done.numbers == [2]
        put_behind(store, 3, done.of(3))  # the entry being written counts until it is written
        assert counted(store, "dropped", "queued", "queued_bytes") == (2, 1, 2 * 300 * 64)
        tier.gate.set()
        await store.drain(LONG_S)
        assert done.numbers == [2, 3, 0, 1]
        assert list(tier.held) == [entry.key for entry in entries[:2]]
        put_behind(store, 4, done.of(4))
        await store.drain(LONG_S)
        assert counted(store, "written", "dropped", "queued_bytes") == (3, 2, 0)
        assert await store.close(LONG_S)

    on_loop(test)


def test_close_finishes_one_write_and_drops_the_rest() -> None:
    async def test() -> None:
        tier, done = GatedTier(), Done()
        tier.gate.clear()
        store = TieredStore([tier], LONG_S, 1 << 20)
        for number in range(3):
            put_behind(store, number, done.of(number))
        await store.drain(0.01)
        closing = asyncio.ensure_future(store.close(LONG_S))
        await asyncio.sleep(0)
        assert done.numbers == [1, 2]
        assert not closing.done()
        tier.gate.set()
        assert await closing
        assert done.numbers == [1, 2, 0]
        put_behind(store, 3, done.of(3))
        assert done.numbers == [1, 2, 0, 3]
        assert counted(store, "written", "dropped", "queued_bytes") == (1, 3, 0)

    on_loop(test)


def test_a_cancelled_caller_is_cancelled(tmp_path: Path) -> None:
    async def test() -> None:
        tier = GatedTier()
        store = TieredStore([tier], LONG_S, 1 << 20)
        tier.gate.clear()
        finding = asyncio.ensure_future(store.find([bytes(32)]))
        await asyncio.sleep(0)
        finding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await finding
        assert counted(store, "late", "failed", "misses") == (0, 0, 0)
        assert await store.close(LONG_S)

    on_loop(test)


def test_a_hung_write_is_left_behind_and_never_done(tmp_path: Path) -> None:
    async def test() -> None:
        tier = await LmdbTier.open(tmp_path / "store.lmdb", 64 << 20)
        store, done = TieredStore([tier], LONG_S, 1 << 20), Done()
        hold = threading.Event()
        hung = tier._writer.submit(hold.wait)
        for number in range(3):
            put_behind(store, number, done.of(number))
        await store.drain(0.05)
        assert not await store.close(0.05)
        assert done.numbers == [1, 2]
        with pytest.raises(LeftBehindError):
            await hung
        assert await store.find([bytes(32)]) == [None]
        hold.set()
        assert not await store.close(LONG_S)
        assert done.numbers == [1, 2]
        assert counted(store, "written", "write_failed", "dropped", "queued") == (0, 0, 2, 0)

    on_loop(test)


def test_a_tier_that_fails_its_close_leaves_the_others_closed(tmp_path: Path) -> None:
    async def test() -> None:
        first, second = await LmdbTier.open(tmp_path / "store.lmdb", 64 << 20), GatedTier()
        hold = threading.Event()
        first._readers.submit(hold.wait)
        first._readers.submit(hold.wait)
        store = TieredStore([first, second], LONG_S, 1 << 20)
        assert not await store.close(0.05)
        assert second.num_closed == 1
        hold.set()

    on_loop(test)
