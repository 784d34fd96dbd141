"""Whether the pages of an LMDB file hang together. LMDB trusts them, and ends the process if they do not."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mmcache.tiers.lmdb_guard import DamagedFileError, Meta

NO_PAGE = (1 << 64) - 1
NUM_META_PAGES = 2
MAX_DEPTH = 32

_HEAD = struct.Struct("<QHHHH")  # page number; unused; kind; where the node table ends and the nodes begin
_OVERFLOW_HEAD = struct.Struct("<QHHI")  # page number; unused; kind; number of pages
_NODE = struct.Struct("<HHHH")  # size, low and high; flags; key size. Or the child page: low, middle, high
_PAGE_NUMBER = struct.Struct("<Q")
_DATABASE_RECORD = struct.Struct("<4x H 34x Q")  # flags; root
_BRANCH, _LEAF, _OVERFLOW = 1, 2, 4
_BIG, _DATABASE = 1, 2


@dataclass(frozen=True, slots=True)
class _Value:
    key: bytes
    flags: int
    nbytes: int
    stored: bytes  # the value, or the number of the page where it begins

    @property
    def page(self) -> int:
        number: int = _PAGE_NUMBER.unpack(self.stored)[0]
        return number


def verify(descriptor: int, meta: Meta, mark: bytes) -> None:
    """Walk every tree of the file, and its list of free pages. No one may write meanwhile.

    Reads each page of keys and the first page of each long value, not the values. Of a file without the key `mark` in
    its main database, which is not ours, only that database is read.

    Raises:
        DamagedFileError: a page is missing, altered, or belongs to two.
        OSError: the file cannot be read.
    """
    pages = _Pages(descriptor, meta)
    main: list[_Value] = []
    free: list[_Value] = []
    pages.walk(meta.main_root, main.append)
    if mark not in {value.key for value in main}:
        return
    for value in main:
        if value.flags & _DATABASE:
            _require(value.nbytes == _DATABASE_RECORD.size, "a database's record has a wrong size")
            flags, root = _DATABASE_RECORD.unpack(value.stored)
            _require(flags == 0, "a database is of another kind")
            pages.walk(root, _nothing)
    pages.walk(meta.free_root, free.append)
    for value in free:
        pages.take_free(value)


class _Pages:
    def __init__(self, descriptor: int, meta: Meta) -> None:
        self._descriptor = descriptor
        self._page_bytes = meta.page_bytes
        self._taken = bytearray(meta.last_page + 1)
        self._taken[:NUM_META_PAGES] = b"\1" * NUM_META_PAGES

    def walk(self, root: int, found: Callable[[_Value], None]) -> None:
        todo = [] if root == NO_PAGE else [(root, 1)]
        while todo:
            number, depth = todo.pop()
            _require(depth <= MAX_DEPTH, "a tree is too deep")
            self._take(number, 1)
            page = self._read(number, self._page_bytes)
            if self._kind(page, number) == _BRANCH:
                todo += [(child, depth + 1) for child in self._children(page)]
            else:
                for value in self._values(page):
                    found(value)

    def take_free(self, value: _Value) -> None:
        """A value of the free list: a count, then page numbers that nothing else may use, in falling order."""
        stored = value.stored
        if value.flags & _BIG:
            stored = self._read(value.page, _HEAD.size + value.nbytes)[_HEAD.size :]
        numbers = memoryview(stored[: len(stored) // 8 * 8]).cast("Q").tolist()
        _require(bool(numbers) and numbers[0] < len(numbers), "a list of free pages is cut")
        before = len(self._taken)
        for number in numbers[1 : numbers[0] + 1]:
            _require(number < before, "a list of free pages is out of order")
            self._take(number, 1)
            before = number

    def _kind(self, page: bytes, number: int) -> int:
        own, _, kind, lower, upper = _HEAD.unpack_from(page)
        _require(own == number and kind in (_BRANCH, _LEAF), f"page {number} is not what it should be")
        _require(_HEAD.size <= lower <= upper <= self._page_bytes, f"page {number} has wrong bounds")
        _require(lower % 2 == 0 and (kind == _LEAF or lower >= _HEAD.size + 4), f"page {number} has too few nodes")
        return int(kind)

    def _nodes(self, page: bytes) -> Iterator[tuple[int, tuple[int, int, int, int]]]:
        *_, lower, upper = _HEAD.unpack_from(page)
        for (offset,) in struct.iter_unpack("<H", page[_HEAD.size : lower]):
            _require(upper <= offset <= self._page_bytes - _NODE.size and offset % 2 == 0, "a node is out of its page")
            node = _NODE.unpack_from(page, offset)
            end = offset + _NODE.size + node[3]
            _require(end <= self._page_bytes, "a key is out of its page")
            yield end, node

    def _children(self, page: bytes) -> Iterator[int]:
        for _, (low, middle, high, _) in self._nodes(page):
            yield low | middle << 16 | high << 32

    def _values(self, page: bytes) -> Iterator[_Value]:
        for start, (low, high, flags, key_bytes) in self._nodes(page):
            nbytes = low | high << 16
            stop = start + (_PAGE_NUMBER.size if flags & _BIG else nbytes)
            _require(stop <= self._page_bytes and key_bytes > 0, "a value is out of its page")
            _require(flags in (0, _BIG, _DATABASE), "a value is of an unknown kind")
            value = _Value(page[start - key_bytes : start], flags, nbytes, page[start:stop])
            if flags & _BIG:
                self._take_long(value)
            yield value

    def _take_long(self, value: _Value) -> None:
        own, _, kind, num_pages = _OVERFLOW_HEAD.unpack(self._read(value.page, _OVERFLOW_HEAD.size))
        _require(own == value.page and kind == _OVERFLOW, f"page {value.page} is not what it should be")
        _require(num_pages == -(-(value.nbytes + _HEAD.size) // self._page_bytes), "a long value has a wrong size")
        self._take(value.page, num_pages)

    def _take(self, number: int, count: int) -> None:
        _require(number + count <= len(self._taken), f"page {number} is beyond the last one")
        _require(not any(self._taken[number : number + count]), f"page {number} is used twice")
        self._taken[number : number + count] = b"\1" * count

    def _read(self, number: int, nbytes: int) -> bytes:
        _require(number < len(self._taken), f"page {number} is beyond the last one")
        data = os.pread(self._descriptor, nbytes, number * self._page_bytes)
        _require(len(data) == nbytes, f"page {number} is missing")
        return data


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise DamagedFileError(rule)


def _nothing(_: _Value) -> None:
    return None
