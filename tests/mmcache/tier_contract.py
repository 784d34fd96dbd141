"""What every tier must do. A tier's own test subclasses `TierContract` and says how to make one and how to harm it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from mmcache.tiers.base import Entry, Tier
from tests.mmcache.entries import DIM, make_entry

CHUNK_BYTES = 4096
LONG_S = 30.0

__all__ = ["CHUNK_BYTES", "DIM", "LONG_S", "TierContract", "make_entry", "read_back"]


async def read_back(tier: Tier, entry: Entry) -> bytes | None:
    """The payload, or None when `read` says that there is none."""
    into = bytearray(entry.nbytes)
    return bytes(into) if await tier.read(entry, memoryview(into)) else None


class TierContract(ABC):
    """Tests of `Tier`; payloads are cut into chunks of CHUNK_BYTES if the tier cuts them."""

    @abstractmethod
    async def make(self, folder: Path) -> Tier:
        """An empty tier."""

    @abstractmethod
    async def damage_header(self, tier: Tier, key: bytes) -> None:
        """Flip one bit of the stored header."""

    @abstractmethod
    async def damage_payload(self, tier: Tier, key: bytes) -> None:
        """Flip one bit of the stored payload."""

    @abstractmethod
    async def lose_chunk(self, tier: Tier, key: bytes) -> None:
        """Remove a part of the stored payload."""

    def run(self, folder: Path, test: Callable[[Tier], Awaitable[None]]) -> None:
        """Run a test on an empty tier, and close it."""

        async def whole() -> None:
            tier = await self.make(folder)
            try:
                await test(tier)
            finally:
                assert await tier.close(LONG_S)
                assert await tier.close(LONG_S)

        asyncio.run(whole())

    def test_a_miss_is_none(self, tmp_path: Path) -> None:
        async def test(tier: Tier) -> None:
            entry, _ = make_entry(1)
            assert await tier.find([entry.key, bytes(32)]) == [None, None]
            assert await tier.find([]) == []
            assert await read_back(tier, entry) is None
            await tier.remove([entry.key])

        self.run(tmp_path, test)

    @pytest.mark.parametrize("tokens", [1, 63, 64, 65, 128, 1000])
    def test_what_is_put_is_found_and_read(self, tmp_path: Path, tokens: int) -> None:
        async def test(tier: Tier) -> None:
            entry, payload = make_entry(1, tokens)
            await tier.put(entry, payload)
            assert await tier.find([entry.key]) == [entry]
            assert await read_back(tier, entry) == payload

        self.run(tmp_path, test)

    def test_a_batch_keeps_its_order(self, tmp_path: Path) -> None:
        async def test(tier: Tier) -> None:
            entries = [make_entry(number, tokens=2) for number in range(200)]
            for entry, payload in entries[::2]:
                await tier.put(entry, payload)
            found = await tier.find([entry.key for entry, _ in entries])
            assert found == [None if place % 2 else entry for place, (entry, _) in enumerate(entries)]

        self.run(tmp_path, test)

    def test_only_the_start_of_a_larger_destination_is_written(self, tmp_path: Path) -> None:
        async def test(tier: Tier) -> None:
            entry, payload = make_entry(1)
            await tier.put(entry, payload)
            into = bytearray(b"\xaa" * (entry.nbytes + 100))
            assert await tier.read(entry, memoryview(into))
            assert into[: entry.nbytes] == payload
            assert into[entry.nbytes :] == b"\xaa" * 100

        self.run(tmp_path, test)

    def test_payloads_of_any_shape_are_taken_as_bytes(self, tmp_path: Path) -> None:
        async def test(tier: Tier) -> None:
            entry, payload = make_entry(1)
            await tier.put(entry, payload.cast("f", list(entry.shape)))
            assert await read_back(tier, entry) == payload

        self.run(tmp_path, test)

    @pytest.mark.parametrize("tokens", [(300, 100), (100, 300), (300, 300)])
    def test_putting_again_keeps_one_whole_entry(self, tmp_path: Path, tokens: tuple[int, int]) -> None:
        async def test(tier: Tier) -> None:
            old, payload = make_entry(1, tokens[0])
            await tier.put(old, payload)
            await tier.put(old, payload)
            assert await read_back(tier, old) == payload
            new, payload = make_entry(1, tokens[1], seed=1)
            await tier.put(new, payload)
            (found,) = await tier.find([new.key])
            assert found in {old, new}
            assert [await read_back(tier, entry) is not None for entry in (old, new)].count(True) == 1
            assert await read_back(tier, found) is not None
            assert await tier.find([new.key]) == [found]
            assert tier.counters["damaged"] == 0

        self.run(tmp_path, test)

    def test_what_is_removed_is_gone(self, tmp_path: Path) -> None:
        async def test(tier: Tier) -> None:
            entries = [make_entry(number) for number in range(3)]
            for entry, payload in entries:
                await tier.put(entry, payload)
            keys = [entry.key for entry, _ in entries]
            await tier.remove([keys[0], keys[2], bytes(32)])
            assert await tier.find(keys) == [None, entries[1][0], None]
            assert await read_back(tier, entries[0][0]) is None
            assert await read_back(tier, entries[1][0]) == entries[1][1]

        self.run(tmp_path, test)

    def test_a_damaged_header_is_a_counted_miss_and_removed(self, tmp_path: Path) -> None:
        async def test(tier: Tier) -> None:
            (entry, payload), (other, other_payload) = make_entry(1), make_entry(2)
            await tier.put(entry, payload)
            await tier.put(other, other_payload)
            await self.damage_header(tier, entry.key)
            assert await tier.find([entry.key, other.key]) == [None, other]
            await self._assert_removed(tier, entry, payload)
            assert await read_back(tier, other) == other_payload

        self.run(tmp_path, test)

    def test_a_header_damaged_after_the_look_up_is_a_counted_miss_and_removed(self, tmp_path: Path) -> None:
        self._run_damaged_read(tmp_path, self.damage_header)

    def test_a_damaged_payload_is_a_counted_miss_and_removed(self, tmp_path: Path) -> None:
        self._run_damaged_read(tmp_path, self.damage_payload)

    def test_a_missing_part_is_a_counted_miss_and_removed(self, tmp_path: Path) -> None:
        self._run_damaged_read(tmp_path, self.lose_chunk)

    def test_a_cancelled_read_lets_go_of_its_destination(self, tmp_path: Path) -> None:
        async def test(tier: Tier) -> None:
            entry, payload = make_entry(1, tokens=20_000)
            await tier.put(entry, payload)
            for num_yields in range(6):
                into = bytearray(entry.nbytes)
                task = asyncio.ensure_future(tier.read(entry, memoryview(into)))
                for _ in range(num_yields):
                    await asyncio.sleep(0.0001)
                task.cancel()
                await asyncio.wait([task])
                into[:] = b"\xaa" * len(into)
                assert await read_back(tier, entry) == payload  # whatever was under way has ended since
                assert into == b"\xaa" * len(into)
            assert tier.counters["damaged"] == 0

        self.run(tmp_path, test)

    def _run_damaged_read(self, folder: Path, damage: Callable[[Tier, bytes], Awaitable[None]]) -> None:
        async def test(tier: Tier) -> None:
            entry, payload = make_entry(1)
            await tier.put(entry, payload)
            await damage(tier, entry.key)
            assert await read_back(tier, entry) is None
            await self._assert_removed(tier, entry, payload)

        self.run(folder, test)

    async def _assert_removed(self, tier: Tier, entry: Entry, payload: memoryview) -> None:
        assert tier.counters["damaged"] == 1
        await tier.put(entry, payload)  # comes after the removal
        assert await tier.find([entry.key]) == [entry]
        assert await read_back(tier, entry) == payload
        assert tier.counters["damaged"] == 1
