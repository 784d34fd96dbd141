"""A call's items, cut into parts: each is read and hashed by itself, so that the sidecar looks up one meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from mmcache.errors import ItemError
from mmcache.keys import ContentKey
from mmcache.media import Media, describe
from mmcache.protocol import MAX_ITEMS

PART_BYTES = 12 << 20
"""A part ends when its items have this many bytes; hashing them takes many times what asking for them does."""

HashKey: TypeAlias = "Callable[[str, bytes, bytes | memoryview], ContentKey]"


class Part:
    """Described items of one request.

    Attributes:
        places: index in the user's call, for each item.
        media, keys: what each is, and its content key.
        nbytes: of all.
        has_more: whether the call has items beyond it.
    """

    __slots__ = ("has_more", "keys", "media", "nbytes", "places")

    def __init__(self) -> None:
        self.places: list[int] = []
        self.media: list[Media] = []
        self.keys: list[ContentKey] = []
        self.nbytes = 0
        self.has_more = False


def cut(
    items: Sequence[object], make_key: HashKey, max_item_bytes: int, on_error: Callable[[int, ItemError], None]
) -> Iterator[Part]:
    """Parts of at least one item each, in order. An item that cannot be described goes to `on_error` with its index."""
    part = Part()
    for index, item in enumerate(items):
        try:
            media = describe(item, index, max_item_bytes)
        except ItemError as error:
            on_error(index, error)
            continue
        part.keys.append(make_key(media.kind, media.header, media.raw))
        part.media.append(media)
        part.places.append(index)
        part.nbytes += media.nbytes
        if part.nbytes >= PART_BYTES or len(part.keys) == MAX_ITEMS:
            part.has_more = index + 1 < len(items)
            yield part
            part = Part()
    if part.keys:
        yield part


def is_one_item(items: Any) -> bool:
    """Whether what should be a list is an item, or pixels that could be one item or several."""
    if isinstance(items, str | bytes | bytearray | memoryview | os.PathLike) or not hasattr(items, "__iter__"):
        return True
    num_axes = getattr(items, "ndim", 1)
    holds_numbers = hasattr(items, "dtype") and getattr(items.dtype, "kind", "u") in "biufc"
    return num_axes != 1 or holds_numbers
