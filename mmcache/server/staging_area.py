"""One client's staging region: its memory, which nobody maps here, and what is in it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from typing import TypeAlias

from ipc.errors import ExtentTooLarge
from ipc.shares import HolderState
from ipc.staging import Staged, Staging
from ipc.unmapped import UnmappedMemory
from mmcache.errors import SliceGone, StagingExhausted
from mmcache.server.staged import OVER, StagedSlice

Told: TypeAlias = "Callable[[StagingArea], None]"


class StagingArea:
    """A region and its slices. Owns the memory.

    Attributes:
        region_id: names the region to ranks.
        namespace: of the client.
        slices: those that are not over, by token.
        is_shown: whether the client has the descriptor.
        turn: held by whoever reserves, so that two half-served questions never wait on each other.
        made_at: when, on the monotonic clock, in seconds.
        bytes_charged: what the memory takes of the machine's.
    """

    def __init__(
        self,
        region_id: int,
        namespace: str,
        memory: UnmappedMemory,
        forget: Callable[[StagedSlice], None],
        on_idle: Told,
    ) -> None:
        """`forget` is told of each slice that is over, `on_idle` once that the client has left and nothing is left."""
        self.region_id = region_id
        self.namespace = namespace
        self.staging = Staging(memory.nbytes)
        self.slices: dict[int, StagedSlice] = {}
        self.is_shown = False
        self.turn = asyncio.Lock()
        self.made_at = time.monotonic()
        self.bytes_charged = memory.nbytes
        self._memory = memory
        self._forget = forget
        self._on_idle = on_idle
        self._has_left = False
        self._is_closing = False
        self._freed = asyncio.Event()

    @property
    def fd(self) -> int | None:
        """The descriptor, to be passed on; None when the memory is being given back."""
        return None if self._is_closing else self._memory.fd

    async def reserve(self, nbytes: int, consumers: int, own: Collection[Staged]) -> Staged:
        """Room for a slice, however long it takes. The caller has the turn; `own` stay until it has been answered.

        Raises:
            StagingExhausted: there will be none as long as `own` are there, whatever else ends.
            SliceGone: the client has left meanwhile.
        """
        while True:
            if self.staging.state is not HolderState.CONNECTED:
                raise SliceGone(OVER)
            try:
                staged = self.staging.reserve(nbytes, consumers)
            except ExtentTooLarge as error:
                raise StagingExhausted(f"{error}; raise staging_bytes") from error
            if staged is not None:
                return staged
            if not self.staging.could_fit(nbytes, own):
                raise StagingExhausted(_too_much(nbytes, own, self.staging.bytes_total))
            self._freed.clear()
            await self._freed.wait()

    def late(self) -> StagingExhausted:
        """There was no room until the deadline."""
        used, total = self.staging.bytes_used, self.staging.bytes_total
        what = f"{len(self.slices)} slices of this client take {used} of {total} bytes"
        return StagingExhausted(f"no room until the deadline: {what} (staging_bytes)")

    def freed(self) -> None:
        """Bytes were given back (called by slices)."""
        self._freed.set()
        if self._has_left:
            self._shrink()

    def forget(self, staged: StagedSlice) -> None:
        """A slice is over (called by it)."""
        self.slices.pop(staged.token, None)
        self._forget(staged)

    def leave(self, leave: Callable[[], None]) -> None:
        """The client has left in one of two ways, `Staging.quarantine` or `Staging.end_all`."""
        leave()
        for staged in list(self.slices.values()):
            staged.left()
        self._has_left = True
        self.freed()

    def close(self, done: Told) -> None:
        """Give the memory back, in a thread; then tell `done`."""
        closing = asyncio.get_running_loop().run_in_executor(None, self._memory.close)
        closing.add_done_callback(lambda _: done(self))

    def _shrink(self) -> None:
        """Nothing is staged here any more: keep only what somebody may still read or write."""
        if self._is_closing:
            return
        if self.staging.is_idle:
            self._is_closing = True
            self._on_idle(self)
            return
        giving = asyncio.get_running_loop().run_in_executor(None, self._memory.give_back, self.staging.free_runs())
        giving.add_done_callback(self._gave_back)

    def _gave_back(self, giving: asyncio.Future[int]) -> None:
        self.bytes_charged = min(self.bytes_charged, self._memory.nbytes - giving.result())


def _too_much(nbytes: int, own: Collection[Staged], total: int) -> str:
    held = sum(staged.nbytes for staged in own)
    reason = f"the slices asked for before it, {held} bytes, leave no room for {nbytes} in a region of {total} bytes"
    return f"{reason}; stage fewer items at once, or raise staging_bytes"
