"""A call's items, cut into parts: each is read and hashed by itself, so that the sidecar looks up one meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from mmcache.errors import ItemError, NotCached
from mmcache.keys import DIGEST_BYTES, ContentKey
from mmcache.media import Media, describe
from mmcache.records import MAX_ITEMS
from mmcache.refs import StagedRef

PART_BYTES = 12 << 20
"""A part ends when its items have this many bytes; hashing them takes many times what asking for them does."""

HashKey: TypeAlias = "Callable[[str, bytes, bytes | memoryview], ContentKey]"


class Part:
    """Items of one request, with their keys.

    Attributes:
        places: index in the user's call, for each item.
        keys: content keys.
        staged: tokens of items that are staged, by position.
        nbytes: of all that were read.
        has_more: whether the call has items beyond it.
        attempt: how many times its items were refused before.
    """

    __slots__ = ("_items", "_max_item_bytes", "_media", "attempt", "has_more", "keys", "nbytes", "places", "staged")

    def __init__(self, max_item_bytes: int) -> None:
        self.places: Sequence[int] = []
        self.keys: Sequence[ContentKey] = []
        self.staged: dict[int, int] = {}
        self.nbytes = 0
        self.has_more = False
        self.attempt = 0
        self._max_item_bytes = max_item_bytes
        self._items: Sequence[object] = []
        self._media: list[Media | None] = []

    def media(self, position: int) -> Media:
        """What an item is; one whose key was given is read only now. Raises the ItemError of a bad item."""
        media = self._media[position] if position < len(self._media) else None
        if media is None:
            item = self._items[position]
            if item is None or isinstance(item, StagedRef):
                raise NotCached("no tier has it, and only its key was given", index=self.places[position])
            media = describe(item, self.places[position], self._max_item_bytes)
        return media

    def item(self, position: int) -> object:
        """What the user gave."""
        return self._items[position]

    def source(self, position: int) -> str:
        """What the user gave, for messages."""
        if position < len(self._media) and (media := self._media[position]) is not None:
            return media.source
        item = self._items[position]
        return str(item) if isinstance(item, str | os.PathLike) else type(item).__name__

    def add(self, place: int, item: object, key: ContentKey, media: Media | None) -> None:
        """One more item."""
        assert isinstance(self.places, list), "a part of given keys is complete"
        assert isinstance(self.keys, list), "a part of given keys is complete"
        assert isinstance(self._items, list), "a part of given keys is complete"
        if isinstance(item, StagedRef):
            self.staged[len(self.keys)] = item.token
        self.places.append(place)
        self._items.append(item)
        self.keys.append(key)
        self._media.append(media)
        self.nbytes += media.nbytes if media is not None else 0

    def again(self, positions: Sequence[int]) -> Part:
        """Some of its items, to be asked for once more. What was read of them is not read again."""
        part = Part(self._max_item_bytes)
        part.attempt = self.attempt + 1
        part.places = [self.places[position] for position in positions]
        part.keys = [self.keys[position] for position in positions]
        part._items = [self._items[position] for position in positions]
        part._media = [self._media[position] if position < len(self._media) else None for position in positions]
        part.staged = {new: self.staged[old] for new, old in enumerate(positions) if old in self.staged}
        return part

    @property
    def is_full(self) -> bool:
        """Whether the next item goes into another part."""
        return self.nbytes >= PART_BYTES or len(self.keys) == MAX_ITEMS

    @classmethod
    def of_keys(cls, places: range, items: Sequence[object], keys: Sequence[ContentKey], max_item_bytes: int) -> Part:
        """A part whose keys are known: its items are looked at only if their bytes are asked for."""
        part = cls(max_item_bytes)
        part.places, part._items, part.keys = places, items, keys
        return part


def content_key(item: object, make_key: HashKey, max_item_bytes: int) -> ContentKey:
    """The key of one item. Raises the ItemError of a bad one."""
    if isinstance(item, StagedRef):
        return ContentKey.from_hex(item.key)
    media = describe(item, 0, max_item_bytes)
    return make_key(media.kind, media.header, media.raw)


def cut(
    items: Sequence[object],
    make_key: HashKey,
    max_item_bytes: int,
    on_error: Callable[[int, ItemError], None],
) -> Iterator[Part]:
    """Parts of at least one item each, in order. An item that cannot be described goes to `on_error` with its index.

    A part comes once it is known whether another one follows: `has_more` is a promise to the sidecar.
    """
    part = Part(max_item_bytes)
    for index, item in enumerate(items):
        media = None
        if not isinstance(item, StagedRef):
            try:
                media = describe(item, index, max_item_bytes)
            except ItemError as error:
                on_error(index, error)
                continue
        if part.is_full:
            part.has_more = True
            yield part
            part = Part(max_item_bytes)
        if isinstance(item, StagedRef):
            part.add(index, item, ContentKey.from_hex(item.key), None)
        elif media is not None:
            part.add(index, item, make_key(media.kind, media.header, media.raw), media)
    if part.keys:
        yield part


def cut_keys(items: Sequence[object], keys: Sequence[ContentKey], max_item_bytes: int) -> Iterator[Part]:
    """Parts of items whose keys were given: nothing is read."""
    for start in range(0, len(keys), MAX_ITEMS):
        end = min(start + MAX_ITEMS, len(keys))
        part = Part.of_keys(range(start, end), items[start:end], keys[start:end], max_item_bytes)
        part.has_more = end < len(keys)
        yield part


def checked_keys(keys: Sequence[ContentKey], num_items: int) -> list[ContentKey]:
    """Keys that a user gives. Raises ValueError or TypeError unless there is one of 16 bytes for each item."""
    keys = list(keys)
    if len(keys) != num_items:
        raise ValueError(f"{num_items} items need as many keys, got {len(keys)}")
    if set(map(type, keys)) == {ContentKey}:
        return keys
    for index, key in enumerate(keys):
        if type(key) is not ContentKey:
            if not isinstance(key, bytes) or len(key) != DIGEST_BYTES:
                raise TypeError(f"keys[{index}] must be a ContentKey, got {type(key).__name__}")
            keys[index] = ContentKey(key)
    return keys


def is_one_item(items: Any) -> bool:
    """Whether what should be a list is an item, or pixels that could be one item or several."""
    if isinstance(items, str | bytes | bytearray | memoryview | os.PathLike | StagedRef) or not hasattr(
        items, "__iter__"
    ):
        return True
    num_axes = getattr(items, "ndim", 1)
    holds_numbers = hasattr(items, "dtype") and getattr(items.dtype, "kind", "u") in "biufc"
    return num_axes != 1 or holds_numbers
