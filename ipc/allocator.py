"""Where extents lie in a fixed range of bytes, and which of them to give up when room is short.

Knows offsets, sizes and prices; no memory, no leases, no torch. Free ranges are found by best fit; room is made by the
cheapest contiguous window, which is searched over columns in the order of offsets.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort

import numpy as np

from ipc.window import KEPT, Columns, WindowSearch

ALIGNMENT = 256


class Allocator:
    """Extents in `capacity_bytes` bytes (rounded down to `alignment`); every offset and size is a multiple of it.

    A new extent is *kept*: no window contains it. `offer` makes it evictable, `keep` takes the offer back.
    """

    def __init__(self, capacity_bytes: int, alignment: int = ALIGNMENT) -> None:
        if alignment <= 0 or capacity_bytes < alignment:
            raise ValueError(f"capacity_bytes must be at least the alignment, got {capacity_bytes} and {alignment}")
        self.alignment = alignment
        self.capacity_bytes = capacity_bytes - capacity_bytes % alignment
        self.bytes_used = 0
        # Live extents in the order of offsets. The spare element at each end makes gaps plain slices:
        # gap i lies between _ends[i] and _starts[i], and comes before extent i.
        self._starts = array("q", [self.capacity_bytes])
        self._ends = array("q", [0])
        self._rows = array("q")
        # By row, in no order; a row is reused after its extent is freed.
        self._seconds = array("d")
        self._used_at = array("d")
        self._spare_rows: list[int] = []
        self._search = WindowSearch()
        self._row_of: dict[int, int] = {}
        # Free ranges: by size, then offset, for best fit; by either end, for coalescing.
        self._free = [(self.capacity_bytes, 0)]
        self._free_from = {0: self.capacity_bytes}
        self._free_to = {self.capacity_bytes: 0}

    @property
    def num_extents(self) -> int:
        """Live extents."""
        return len(self._rows)

    def round_up(self, nbytes: int) -> int:
        """What an extent of `nbytes` bytes takes."""
        return -(-nbytes // self.alignment) * self.alignment

    def allocate(self, nbytes: int) -> int | None:
        """The offset of a new, kept extent in the smallest free range that fits; None if none does."""
        if nbytes <= 0:
            raise ValueError(f"nbytes must be positive, got {nbytes}")
        size = self.round_up(nbytes)
        index = bisect_left(self._free, (size, 0))
        if index == len(self._free):
            return None
        free_size, offset = self._free.pop(index)
        del self._free_from[offset]
        if free_size > size:
            start, end = offset + size, offset + free_size
            self._free_from[start] = end
            self._free_to[end] = start
            insort(self._free, (end - start, start))
        else:
            del self._free_to[offset + size]
        self._add_extent(offset, size)
        return offset

    def free(self, offset: int) -> None:
        """Give back the extent at `offset`; its range joins the free ranges beside it."""
        row = self._row_of.pop(offset, None)
        if row is None:
            raise ValueError(f"no extent begins at offset {offset}")
        index = bisect_left(self._starts, offset)
        start, end = offset, self._ends[index + 1]
        del self._starts[index], self._ends[index + 1], self._rows[index]
        self._seconds[row] = KEPT
        self._spare_rows.append(row)
        self.bytes_used -= end - start
        before, after = self._free_to.get(start), self._free_from.get(end)
        if before is not None:
            self._take_free(before, start)
            start = before
        if after is not None:
            self._take_free(end, after)
            end = after
        self._add_free(start, end)

    def offer(self, offset: int, cost_seconds: float, used_at: float) -> None:
        """The extent at `offset` may be evicted: it costs `cost_seconds` to make again and was last used at `used_at`.

        An offer replaces the one before it.
        """
        row = self._row_of[offset]
        self._seconds[row] = cost_seconds
        self._used_at[row] = used_at

    def keep(self, offset: int) -> None:
        """The extent at `offset` must not be evicted."""
        self._seconds[self._row_of[offset]] = KEPT

    def is_offered(self, offset: int) -> bool:
        """Whether the extent at `offset` may be evicted."""
        return self._seconds[self._row_of[offset]] != KEPT

    def window(self, nbytes: int, now: float) -> list[int] | None:
        """The offsets of the extents to free so that `nbytes` bytes fit; None if kept extents leave no room.

        Of all contiguous windows of free ranges and offered extents, the one with the lowest price. An extent's price
        is the seconds it costs to make again over the seconds since its last use, an estimate of the time lost per
        second by its absence. Bytes freed beyond `nbytes` cost half of what the pool's bytes cost on average. A window
        of more than three times `nbytes` is taken only if there is no smaller one, and then the smallest.
        """
        size = self.round_up(nbytes)
        if self._free and self._free[-1][0] >= size:
            return []
        columns = Columns(
            begins=np.frombuffer(self._ends, np.int64),
            limits=np.frombuffer(self._starts, np.int64),
            rows=np.frombuffer(self._rows, np.int64),
            seconds=np.frombuffer(self._seconds, np.float64),
            used_at=np.frombuffer(self._used_at, np.float64),
        )
        gaps = self._search.find(columns, size, now)
        return None if gaps is None else self._starts[gaps[0] : gaps[1]].tolist()

    def extents(self) -> list[tuple[int, int]]:
        """Offset and size in bytes of every extent, in the order of offsets."""
        return [(start, end - start) for start, end in zip(self._starts[:-1], self._ends[1:], strict=True)]

    def check(self) -> None:
        """Assert that extents and free ranges partition the capacity, and that no two free ranges touch."""
        extents = self.extents()
        free = [(offset, end - offset) for offset, end in self._free_from.items()]
        ranges = sorted(extents + free)
        assert sum(size for _, size in extents) == self.bytes_used, "bytes_used differs from the extents"
        assert sum(size for _, size in ranges) == self.capacity_bytes, "ranges do not add up to the capacity"
        position = 0
        for offset, size in ranges:
            assert offset == position, "ranges overlap or leave a hole"
            assert size > 0, "a range is empty"
            assert size % self.alignment == 0, "a range is not aligned"
            position += size
        assert all(offset + size not in self._free_from for offset, size in free), "two free ranges touch"
        assert sorted((size, offset) for offset, size in free) == self._free, "the free ranges by size differ"
        assert {end: start for start, end in self._free_from.items()} == self._free_to, "free ranges' ends differ"
        assert [self._row_of[offset] for offset, _ in extents] == list(self._rows), "a row belongs to another extent"
        assert len(set(self._rows) | set(self._spare_rows)) == len(self._seconds), "a row is lost"

    def _add_extent(self, offset: int, size: int) -> None:
        if self._spare_rows:
            row = self._spare_rows.pop()
        else:
            row = len(self._seconds)
            self._seconds.append(KEPT)
            self._used_at.append(0.0)
        self._row_of[offset] = row
        index = bisect_left(self._starts, offset)
        self._starts.insert(index, offset)
        self._ends.insert(index + 1, offset + size)
        self._rows.insert(index, row)
        self.bytes_used += size

    def _add_free(self, start: int, end: int) -> None:
        self._free_from[start] = end
        self._free_to[end] = start
        insort(self._free, (end - start, start))

    def _take_free(self, start: int, end: int) -> None:
        del self._free_from[start]
        del self._free_to[end]
        del self._free[bisect_left(self._free, (end - start, start))]
