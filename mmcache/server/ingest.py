"""The ingest region: fixed shared memory where decoders leave pixels, and the store embeddings, for the ranks."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from ipc.allocator import ALIGNMENT, Allocator
from ipc.memory_shm import SharedRegion
from mmcache.errors import ImageTooLarge


class IngestBusyError(Exception):
    """There is no room that work of low priority may take."""


class IngestSlice(NamedTuple):
    """A part of the ingest region that belongs to whoever reserved it until it is freed."""

    offset: int
    nbytes: int


class Ingest:
    """Allocates the region in the order of arrival; a request waits for room, within its caller's patience."""

    def __init__(self, nbytes: int) -> None:
        self.region = SharedRegion.create("mmcache-ingest", nbytes)
        self.region.seal_resize()
        self._allocator = Allocator(self.region.nbytes)
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()
        self._num_waiting = 0
        self.bytes_used = 0

    @property
    def is_waited_for(self) -> bool:
        """Whether a request waits for room."""
        return self._num_waiting > 0

    async def reserve(self, nbytes: int) -> IngestSlice:
        """Wait for `nbytes` of room.

        Raises:
            ImageTooLarge: more than the whole region.
        """
        if nbytes > self.region.nbytes:
            raise ImageTooLarge(
                f"{nbytes} bytes of pixels or payload, the ingest region holds {self.region.nbytes} (ingest_bytes)"
            )
        offset = None if self._num_waiting else self._allocator.allocate(nbytes)
        if offset is None:
            offset = await self._in_turn(nbytes)
        self.bytes_used += nbytes
        return IngestSlice(offset, nbytes)

    def reserve_spare(self, nbytes: int) -> IngestSlice:
        """Take room without waiting, if nobody waits for any and half of the region stays free.

        Raises:
            IngestBusyError: otherwise.
        """
        is_spare = not self.is_waited_for and self.bytes_used + nbytes <= self.region.nbytes // 2
        offset = self._allocator.allocate(nbytes) if is_spare else None
        if offset is None:
            raise IngestBusyError
        self.bytes_used += nbytes
        return IngestSlice(offset, nbytes)

    def free(self, part: IngestSlice) -> None:
        """Give a slice back. Nothing may read or write it any more."""
        self._allocator.free(part.offset)
        self.bytes_used -= part.nbytes
        self._freed.set()

    async def _in_turn(self, nbytes: int) -> int:
        self._num_waiting += 1
        try:
            async with self._turn:
                while (offset := self._allocator.allocate(nbytes)) is None:
                    self._freed.clear()
                    await self._freed.wait()
                return offset
        finally:
            self._num_waiting -= 1

    def check(self) -> None:
        """Assert that the allocator and the count agree."""
        self._allocator.check()
        used, padding = self._allocator.bytes_used, ALIGNMENT * self._allocator.num_extents
        assert used - padding <= self.bytes_used <= used, f"{self.bytes_used} bytes are taken, {used} with alignment"

    def memory(self, part: IngestSlice) -> memoryview:
        """The slice's bytes, writable."""
        return self.region.array(part.offset, part.nbytes).data

    def close(self) -> None:
        """Unmap the region."""
        self.region.close()
