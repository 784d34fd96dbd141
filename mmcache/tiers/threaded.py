"""A tier over a file that blocks: one thread writes, a few read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from mmcache.tiers.base import Entry, Purged, Selection, Tier, TierError
from mmcache.tiers.threads import Landing, Outcome, Step, Threads, settled

T = TypeVar("T")


class BlockingFile(Protocol):
    """Called in threads: any may read, one at a time may write. Raises TierError and nothing else."""

    num_damaged: int
    """How many times the whole file was found damaged."""

    def find(self, keys: Sequence[bytes]) -> tuple[list[Entry | None], list[bytes]]:
        """Entries in the order of the keys, and the keys whose records are damaged (None among the entries)."""

    def read(self, entry: Entry, landing: Landing) -> Outcome:
        """Copy and verify a payload."""

    def put(self, entry: Entry, payload: memoryview) -> int:
        """Write an entry whole, unless it is there. Returns how many were evicted for it."""

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove what is there of these entries, whole or damaged."""

    def purge(self, selection: Selection, after: bytes, is_dry_run: bool) -> Step:
        """A part of a purge, from the key `after` on."""

    def usage(self) -> tuple[int, int]:
        """Entries, and bytes that they take."""

    def close(self) -> None:
        """Close the file. No other call may be running, or come later."""


class ThreadedTier(Tier):
    """The methods of a tier, each run in a thread on the file. All three arguments are owned from now on."""

    def __init__(self, file: BlockingFile, usage: tuple[int, int], writer: Threads, readers: Threads) -> None:
        super().__init__()
        self.counters.update(dict.fromkeys(("damaged", "evicted", "purged", "remove_failed"), 0))
        self._file = file
        self._writer = writer
        self._readers = readers
        self._closing: asyncio.Task[bool] | None = None
        self._gauge(usage)

    async def find(self, keys: Sequence[bytes]) -> list[Entry | None]:
        found, damaged = await self._read(self._file.find, keys)
        if damaged:
            self._discard(damaged)
        return found

    async def read(self, entry: Entry, into: memoryview) -> bool:
        landing = Landing(into.cast("B"))
        try:
            outcome = await self._read(self._file.read, entry, landing)
        finally:
            landing.close()  # a cancelled thread may still be at it, and nobody hears what it finds
        if outcome is Outcome.DAMAGED:
            self._discard([entry.key])
        return outcome is Outcome.READ

    async def put(self, entry: Entry, payload: memoryview) -> None:
        self.counters["evicted"] += await self._write(self._file.put, entry, payload.cast("B"))

    async def remove(self, keys: Sequence[bytes]) -> None:
        await self._write(self._file.remove, keys)

    async def purge(self, selection: Selection, *, is_dry_run: bool = False) -> Purged:
        num_entries = nbytes = 0
        after: bytes | None = b""
        run = self._read if is_dry_run else self._write
        while after is not None:  # between two steps others have their turn
            step = await run(self._file.purge, selection, after, is_dry_run)
            num_entries += step.num_entries
            nbytes += step.nbytes
            after = step.after
            if not is_dry_run:
                self.counters["purged"] += step.num_entries
                self.counters["damaged"] += step.num_damaged
        return Purged(num_entries, nbytes)

    async def close(self, timeout_s: float) -> bool:
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close(timeout_s))
        return await asyncio.shield(self._closing)

    async def _close(self, timeout_s: float) -> bool:
        deadline = asyncio.get_running_loop().time() + timeout_s
        closed = await self._readers.close(timeout_s)
        if closed:
            self._writer.submit(self._file.close)
        return await self._writer.close(deadline - asyncio.get_running_loop().time()) and closed

    def _discard(self, keys: Sequence[bytes]) -> None:
        """Count damaged entries and have them removed, before anything that is put from now on."""
        self.counters["damaged"] += len(keys)
        if self._closing is None:
            self._writer.submit(self._measured, self._file.remove, keys).add_done_callback(self._discarded)

    def _discarded(self, removal: asyncio.Future[tuple[None, tuple[int, int]]]) -> None:
        try:
            self._gauge(removal.result()[1])
        except TierError:
            self.counters["remove_failed"] += 1

    async def _write(self, work: Callable[..., T], *arguments: object) -> T:
        done: asyncio.Future[tuple[T, tuple[int, int]]]
        done = self._submit(self._writer, self._measured, work, *arguments)
        try:
            result, usage = await settled(done)
        finally:
            self.counters["damaged_files"] = self._file.num_damaged
        self._gauge(usage)
        return result

    async def _read(self, work: Callable[..., T], *arguments: object) -> T:
        try:
            return await self._submit(self._readers, work, *arguments)
        finally:
            self.counters["damaged_files"] = self._file.num_damaged

    def _submit(self, threads: Threads, work: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        if self._closing is not None:
            raise TierError(f"the {self.name} store is closed")
        return threads.submit(work, *arguments)

    def _measured(self, work: Callable[..., T], *arguments: object) -> tuple[T, tuple[int, int]]:
        return work(*arguments), self._file.usage()

    def _gauge(self, usage: tuple[int, int]) -> None:
        self.counters["entries"], self.counters["bytes_used"] = usage
        self.counters["damaged_files"] = self._file.num_damaged
