"""What every tier must do that can be purged: see `TierContract`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from mmcache.tiers.base import Entry, Purged, Selection, Tier
from tests.mmcache.tier_contract import TierContract, make_entry, read_back

OLD, NEW = b"a fingerprint 16", b"another one, too"
MINE, THEIRS = b"mine.ns.", b"theirs.."


def mixed_entries(num_of_each: int = 3) -> list[tuple[Entry, memoryview]]:
    """Entries of two models in two namespaces, as many of each; sizes differ."""
    entries = []
    for group, (fingerprint, namespace) in enumerate([(OLD, MINE), (OLD, THEIRS), (NEW, MINE), (NEW, THEIRS)]):
        for number in range(num_of_each):
            entry, payload = make_entry(10 * group + number, tokens=1 + 7 * (number % 9) + group)
            key = fingerprint + number.to_bytes(12, "big") + namespace[:4]
            entries.append((dataclasses.replace(entry, key=key, namespace=namespace), payload))
    return entries


SELECTIONS = {
    "all": Selection(),
    "namespace": Selection(namespace=THEIRS),
    "fingerprint": Selection(fingerprint=OLD),
    "stale": Selection(other_than=NEW),
    "stale in a namespace": Selection(other_than=NEW, namespace=MINE),
    "keys": Selection(keys={entry.key for entry, _ in mixed_entries()[::5]} | {bytes(32)}),
    "keys in a namespace": Selection(keys={entry.key for entry, _ in mixed_entries()[::5]}, namespace=MINE),
    "none": Selection(namespace=b"nobody's"),
}


class PurgeContract(TierContract):
    """Tests of `Tier.purge`."""

    @pytest.mark.parametrize("name", list(SELECTIONS))
    def test_a_purge_removes_what_is_meant_and_nothing_else(self, tmp_path: Path, name: str) -> None:
        selection = SELECTIONS[name]

        async def test(tier: Tier) -> None:
            entries = mixed_entries()
            await _put_all(tier, entries)
            meant = [entry for entry, _ in entries if selection.has(entry)]
            expected = Purged(len(meant), sum(entry.nbytes for entry in meant))
            assert await tier.purge(selection, is_dry_run=True) == expected
            keys = [entry.key for entry, _ in entries]
            assert await tier.find(keys) == [entry for entry, _ in entries]
            assert await tier.purge(selection) == expected
            left = [None if selection.has(entry) else entry for entry, _ in entries]
            assert await tier.find(keys) == left
            for entry, payload in entries:
                assert await read_back(tier, entry) == (None if selection.has(entry) else payload)
            assert await tier.purge(selection) == Purged(0, 0)
            assert tier.counters["purged"] == len(meant)
            assert tier.counters["damaged"] == 0

        self.run(tmp_path, test)

    def test_a_purge_goes_beyond_one_step(self, tmp_path: Path) -> None:
        async def test(tier: Tier) -> None:
            entries = mixed_entries(num_of_each=120)
            await _put_all(tier, entries)
            meant = [entry for entry, _ in entries if entry.namespace == MINE]
            assert await tier.purge(Selection(namespace=MINE)) == (240, sum(entry.nbytes for entry in meant))
            found = await tier.find([entry.key for entry, _ in entries])
            assert [entry for entry in found if entry is not None] == [
                entry for entry, _ in entries if entry.namespace == THEIRS
            ]

        self.run(tmp_path, test)

    def test_a_purge_counts_and_removes_what_is_damaged_on_its_way(self, tmp_path: Path) -> None:
        async def test(tier: Tier) -> None:
            entries = mixed_entries()
            await _put_all(tier, entries)
            (damaged, payload), *others = entries
            await self.damage_header(tier, damaged.key)
            selection = Selection(fingerprint=OLD)
            num_meant = sum(selection.has(entry) for entry, _ in others)
            assert (await tier.purge(selection, is_dry_run=True)).num_entries == num_meant
            assert (await tier.purge(selection)).num_entries == num_meant
            assert tier.counters["damaged"] == 1
            await tier.put(damaged, payload)
            assert await read_back(tier, damaged) == payload

        self.run(tmp_path, test)


async def _put_all(tier: Tier, entries: Sequence[tuple[Entry, memoryview]]) -> None:
    for entry, payload in entries:
        await tier.put(entry, payload)
