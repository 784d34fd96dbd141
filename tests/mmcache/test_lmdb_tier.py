"""The file store: the contract, its budget, and what is no store."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from mmcache.errors import ConfigError
from mmcache.tiers.base import Tier, TierError
from mmcache.tiers.lmdb import LmdbTier
from tests.mmcache.lmdb_store import MAP_BYTES, open_store
from tests.mmcache.purge_contract import PurgeContract
from tests.mmcache.tier_contract import CHUNK_BYTES, LONG_S, make_entry, read_back


def _flip(tier: Tier, database: bytes, key: bytes, change: Callable[[bytes], bytes | None]) -> None:
    assert isinstance(tier, LmdbTier)
    env = tier._file._env
    with env.begin(write=True) as txn, txn.cursor(db=env.open_db(database, txn=txn)) as cursor:
        assert cursor.set_range(key)
        assert cursor.key()[:32] == key
        changed = change(cursor.value())
        if changed is None:
            cursor.delete()
        else:
            cursor.put(cursor.key(), changed)


def _one_bit(value: bytes) -> bytes:
    place = random.Random(len(value)).randrange(len(value))
    return value[:place] + bytes([value[place] ^ 4]) + value[place + 1 :]


class TestLmdbTier(PurgeContract):
    async def make(self, folder: Path) -> Tier:
        return await LmdbTier.open(folder / "store.lmdb", MAP_BYTES, chunk_bytes=CHUNK_BYTES)

    async def damage_header(self, tier: Tier, key: bytes) -> None:
        _flip(tier, b"headers", key, _one_bit)

    async def damage_payload(self, tier: Tier, key: bytes) -> None:
        _flip(tier, b"chunks", key, _one_bit)

    async def lose_chunk(self, tier: Tier, key: bytes) -> None:
        _flip(tier, b"chunks", key, lambda _: None)

    def test_a_short_chunk_is_a_counted_miss(self, tmp_path: Path) -> None:
        async def shorten(tier: Tier, key: bytes) -> None:
            _flip(tier, b"chunks", key, lambda value: value[:-1])

        self._run_damaged_read(tmp_path, shorten)

    def test_a_cancelled_read_writes_nothing_once_its_thread_goes_on(self, tmp_path: Path) -> None:
        async def test(tier: Tier) -> None:
            assert isinstance(tier, LmdbTier)
            entry, payload = make_entry(1)
            await tier.put(entry, payload)
            into = bytearray(entry.nbytes)
            with tier._file._gate.exclusive():  # holds the thread before its transaction
                task = asyncio.ensure_future(tier.read(entry, memoryview(into)))
                await asyncio.sleep(0.01)
                task.cancel()
                await asyncio.wait([task])
            assert await tier.close(LONG_S)  # waits for the thread
            assert task.cancelled()
            assert not any(into)

        self.run(tmp_path, test)


def test_entries_outlive_the_tier_in_a_private_file(tmp_path: Path) -> None:
    entry, payload = make_entry(1)
    with open_store(tmp_path) as (tier, runner):
        runner.run(tier.put(entry, payload))
    with open_store(tmp_path) as (tier, runner):
        assert tier.counters["entries"] == 1
        assert runner.run(tier.find([entry.key])) == [entry]
        assert runner.run(read_back(tier, entry)) == payload
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
        "store.lmdb": 0o600,
        "store.lmdb-lock": 0o600,
    }


def test_the_oldest_make_room_within_the_budget(tmp_path: Path) -> None:
    async def fill(tier: LmdbTier) -> None:
        sizes = random.Random(3)
        entries = [make_entry(number, tokens=sizes.randrange(100, 40_000)) for number in range(60)]
        for entry, payload in entries:
            await tier.put(entry, payload)
            assert await read_back(tier, entry) == payload
            assert tier.counters["bytes_used"] <= 0.7 * MAP_BYTES
        found = await tier.find([entry.key for entry, _ in entries])
        first = next(place for place, entry in enumerate(found) if entry is not None)
        assert None not in found[first:]
        assert tier.counters["entries"] == len(entries) - first
        assert tier.counters["evicted"] == first > 0

    with open_store(tmp_path) as (tier, runner):
        runner.run(fill(tier))
    assert (tmp_path / "store.lmdb").stat().st_size <= MAP_BYTES


def test_an_entry_beyond_the_budget_evicts_nothing(tmp_path: Path) -> None:
    entry, payload = make_entry(1)
    large, large_payload = make_entry(2, tokens=200_000)
    with open_store(tmp_path) as (tier, runner):
        runner.run(tier.put(entry, payload))
        with pytest.raises(TierError, match="beyond the store's budget"):
            runner.run(tier.put(large, large_payload))
        assert runner.run(tier.find([entry.key, large.key])) == [entry, None]


def test_a_smaller_budget_is_reached_by_eviction(tmp_path: Path) -> None:
    entries = [make_entry(number, tokens=1000) for number in range(300)]
    with open_store(tmp_path, 4 * MAP_BYTES) as (tier, runner):
        for entry, payload in entries[:-1]:
            runner.run(tier.put(entry, payload))
        assert tier.counters["bytes_used"] > 0.7 * MAP_BYTES
    with open_store(tmp_path) as (tier, runner):
        runner.run(tier.put(*entries[-1]))
        assert tier.counters["bytes_used"] <= 0.7 * MAP_BYTES
        assert runner.run(read_back(tier, entries[-1][0])) == entries[-1][1]


def test_reads_go_on_while_entries_are_evicted(tmp_path: Path) -> None:
    """A reader sees an entry whole or not at all, while the writer turns the whole store over."""

    async def turn_over(tier: LmdbTier) -> None:
        entries = [make_entry(number, tokens=20_000) for number in range(40)]

        async def write() -> None:
            for entry, payload in entries:
                await tier.put(entry, payload)

        async def read(start: int) -> int:
            num_read = 0
            for entry, payload in entries[start:] + entries[:start]:
                got = await read_back(tier, entry)
                assert got is None or got == payload
                num_read += got is not None
            return num_read

        writing = asyncio.ensure_future(write())
        num_read = 0
        while not writing.done():
            num_read += sum(await asyncio.gather(*(read(start) for start in (0, 13, 27))))
        await writing
        assert num_read > 0
        assert tier.counters["damaged"] == 0

    with open_store(tmp_path) as (tier, runner):
        runner.run(turn_over(tier))


def test_a_closed_store_fails_cleanly(tmp_path: Path) -> None:
    with open_store(tmp_path) as (tier, runner):
        runner.run(tier.close(LONG_S))
        with pytest.raises(TierError, match="closed"):
            runner.run(tier.find([bytes(32)]))


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be a file that LMDB can open"):
        asyncio.run(LmdbTier.open(tmp_path / "absent" / "store.lmdb", MAP_BYTES))
    (tmp_path / "text").write_bytes(b"not a store " * 1000)
    with pytest.raises(ConfigError, match="must be a file that LMDB can open"):
        asyncio.run(LmdbTier.open(tmp_path / "text", MAP_BYTES))
    for name, record, message in (
        ("foreign", (b"theirs", b"1"), "it holds something else"),
        ("later", (b"mmcache", b"2"), "layout version b'2'"),
    ):
        env = lmdb.Environment(str(tmp_path / name), subdir=False)
        with env.begin(write=True) as txn:
            txn.put(*record)
        env.close()
        with pytest.raises(ConfigError, match=message):
            asyncio.run(LmdbTier.open(tmp_path / name, MAP_BYTES))
        assert not (tmp_path / f"{name}.damaged").exists()
