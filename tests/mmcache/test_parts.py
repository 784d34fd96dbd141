"""A call is cut into parts that are asked for one by one."""

from __future__ import annotations

from typing import Any

import mmcache
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
