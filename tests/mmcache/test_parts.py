"""A call is cut into parts that are asked for one by one."""

from __future__ import annotations

from typing import Any

import pytest

import mmcache
import mmcache.parts as parts_of_calls
from mmcache.keys import KeyHasher
from mmcache.parts import PART_BYTES, cut
from mmcache.records import MAX_ITEMS
from tests.mmcache.support import SidecarProcess, image


def test_a_call_of_many_parts(sidecar: SidecarProcess) -> None:
    """More items than one request takes, and more bytes than one part: every position has what is its own."""
    few = [image(number) for number in range(3)]
    items: list[Any] = [few[index % 3] for index in range(2 * MAX_ITEMS + 5)]
    items[MAX_ITEMS] = b"not a picture"
    with sidecar.connect() as client:
        before: int = client.stats()["requests"]
        results = client.encode(items, errors="return")
        assert client.stats()["requests"] - before == 3
        for index, (item, result) in enumerate(zip(items, results, strict=True)):
            if index == MAX_ITEMS:
                assert isinstance(result, mmcache.UndecodableImage)
                assert result.index == index
            else:
                assert result.key == client.key(item)
                result.release()
        assert client.stats()["leases"]["active"] == 0


def test_parts_end_by_bytes_too() -> None:
    errors: dict[int, Exception] = {}
    items = [bytes([number]) * (PART_BYTES // 2) for number in range(5)]
    items.insert(2, b"")
    hasher = KeyHasher(7)
    parts = list(cut(items, hasher.key, PART_BYTES, errors.__setitem__))
    assert [part.places for part in parts] == [[0, 1], [3, 4], [5]]
    assert list(errors) == [2]
    assert parts[2].keys == [hasher.key("image", b"", items[5])]
    assert [part.nbytes for part in parts] == [PART_BYTES, PART_BYTES, PART_BYTES // 2]


def test_more_is_promised_only_if_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call whose last items are bad is over with its last good one."""
    monkeypatch.setattr(parts_of_calls, "PART_BYTES", 10)
    hasher = KeyHasher(7)
    for sizes, expected in (
        ([10, 0], [False]),
        ([10, 0, 0, 10, 0], [True, False]),
        ([0, 10], [False]),
        ([10, 10], [True, False]),
        ([0, 0], []),
        ([4, 4, 4, 0], [False]),
    ):
        errors: dict[int, Exception] = {}
        found = list(cut([b"x" * size for size in sizes], hasher.key, 100, errors.__setitem__))
        assert [part.has_more for part in found] == expected
        assert sorted(place for part in found for place in part.places) == [
            index for index, size in enumerate(sizes) if size
        ]
        assert len(errors) == sizes.count(0)


def test_a_call_that_ends_in_bad_items_is_forgotten_by_the_sidecar(
    sidecar: SidecarProcess, one_item_a_part: None
) -> None:
    with sidecar.connect() as client:
        for _ in range(3):
            good, bad = client.encode([image(1), b"not a picture"[:0]], errors="return")
            assert isinstance(bad, mmcache.UndecodableImage)
            good.release()
        assert client.stats()["leases"]["active"] == 0
        assert client.leases(check=True)["problems"] == []
