"""A pool: extents in one fixed memory, cached until room is needed, and never reused while somebody may read them.

Allocator, extents and leases made one. Bookkeeping only: no memory is touched here, and nothing waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from ipc.allocator import ALIGNMENT, Allocator
from ipc.errors import BadTransition, ExtentTooLarge
from ipc.extents import CACHED, Extent, ExtentState
from ipc.leases import Holder
from ipc.shares import Share

__all__ = ["Extent", "ExtentState", "Pool"]


class Pool:
    """The extents of one fixed memory.

    `on_evict` is called for each cached extent that `reserve` or `retire` takes away, right after it left; it must not
    call back into the pool. Not thread-safe: one thread, the coordinator's, uses it.

    Attributes:
        pool_id: names the memory; a memory that is replaced gets another id.
        bytes_total: capacity, a multiple of the alignment.
        bytes_leased: bytes of extents with a share, each counted once.
        num_evictions, bytes_evicted: extents given up for room, and their bytes.
        num_refused: `reserve` calls that found no window.
        is_retired: whether `retire` was called.
    """

    def __init__(
        self,
        pool_id: int,
        capacity_bytes: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_evict: Callable[[Extent], None],
    ) -> None:
        self.pool_id = pool_id
        self._allocator = Allocator(capacity_bytes, ALIGNMENT)
        self._clock = clock
        self._on_evict = on_evict
        self._extents: dict[int, Extent] = {}
        self.bytes_total = self._allocator.capacity_bytes
        self.bytes_leased = 0
        self.num_evictions = 0
        self.bytes_evicted = 0
        self.num_refused = 0
        self.is_retired = False
        self._has_lost_writer = False

    @property
    def bytes_used(self) -> int:
        """Bytes of extents in any state, alignment included."""
        return self._allocator.bytes_used

    @property
    def num_extents(self) -> int:
        """Extents in any state."""
        return len(self._extents)

    @property
    def is_idle(self) -> bool:
        """Whether no extent is left that somebody writes or may still read."""
        return not any(extent.is_busy or extent.state is ExtentState.WRITING for extent in self._extents.values())

    def extents(self) -> Collection[Extent]:
        """The extents in any state, in no order."""
        return self._extents.values()

    def reserve(self, nbytes: int) -> Extent | None:
        """A new extent in state WRITING, or None while leased, pinned and unfinished extents leave no room for it.

        Makes room, if there is none, by evicting the cheapest contiguous window of cached extents; evicts nothing
        unless that suffices. Raises `ExtentTooLarge` if the extent could never fit, and `BadTransition` if the pool is
        retired.
        """
        if self.is_retired:
            raise BadTransition(f"pool {self.pool_id} is retired; nothing can be reserved in it")
        if nbytes <= 0:
            raise ValueError(f"nbytes must be positive, got {nbytes}")
        if self._allocator.round_up(nbytes) > self.bytes_total:
            raise ExtentTooLarge(f"{nbytes} bytes can never fit into pool {self.pool_id} of {self.bytes_total} bytes")
        now = self._clock()
        offset = self._allocator.allocate(nbytes)
        if offset is None:
            window = self._allocator.window(nbytes, now)
            if window is None:
                self.num_refused += 1
                return None
            for evicted in window:
                self._evict(self._extents[evicted])
            offset = self._allocator.allocate(nbytes)
            assert offset is not None, "a window was freed and nothing fits"
        extent = self._extents[offset] = Extent(self, offset, nbytes, now)
        return extent

    def publish(self, extent: Extent, key: bytes, cost_seconds: float, info: object, group: bytes = b"") -> None:
        """The bytes are complete: WRITING to CACHED.

        Args:
            key: what they are found by.
            cost_seconds: what making them again would take.
            info: the user's.
            group: what the user tells extents apart by.
        """
        extent.move(ExtentState.CACHED)
        extent.key = key
        extent.cost_seconds = cost_seconds
        extent.info = info
        extent.group = group
        self._unused(extent)

    def abandon(self, extent: Extent) -> None:
        """The bytes will never be complete, and their writer is done with them: WRITING to GONE.

        Does nothing if the pool has lost its writer meanwhile, which abandoned everything already.
        """
        if self._has_lost_writer and extent.state is ExtentState.GONE:
            return
        if extent.state is not ExtentState.WRITING:
            raise BadTransition(f"{extent!r} cannot be abandoned")
        self._drop(extent)

    def discard(self, extent: Extent) -> None:
        """Take a cached extent out of use. Its bytes are free once its last share and pin ended, and not before.

        `on_evict` is not called. Does nothing in a retired pool.
        """
        if self.is_retired and extent.state in {ExtentState.DEAD, ExtentState.GONE}:
            return
        if extent.state is not CACHED:
            raise BadTransition(f"{extent!r} cannot be discarded")
        self._end_cached(extent)

    def pin(self, extent: Extent) -> None:
        """A reader inside the coordinator begins: the extent stays until its `unpin`. It has to be cached."""
        if extent.state is not CACHED:
            raise BadTransition(f"{extent!r} cannot be pinned")
        extent.num_pins += 1
        if not extent.num_shares:
            self._allocator.keep(extent.offset)

    def unpin(self, extent: Extent) -> None:
        """A reader inside the coordinator is done. Raises `BadTransition` if the extent has no pin."""
        if not extent.num_pins:
            raise BadTransition(f"{extent!r} has no pin")
        extent.num_pins -= 1
        if not extent.is_busy:
            self._unused(extent)

    def touch(self, extent: Extent) -> None:
        """The extent was of use just now; it is evicted later."""
        extent.last_used = self._clock()
        if extent.state is CACHED and not extent.is_busy:
            self._unused(extent)

    def grant(self, extent: Extent, holder: Holder) -> Share:
        """A share of `holder` on a cached extent of this pool. See `Holder.grant` for the errors.

        The share ends through its holder; the extent is not reused before.
        """
        assert extent.pool is self, f"{extent!r} is not in pool {self.pool_id}"
        return holder.grant(extent)

    def lose_writer(self) -> None:
        """The process that wrote is dead: drop what was being written. What is cached stays, for another writer."""
        self._has_lost_writer = True
        for extent in list(self._extents.values()):
            if extent.state is ExtentState.WRITING:
                self._drop(extent)

    def retire(self) -> None:
        """The memory is written no more: drop what was being written and evict what is cached. Twice is harmless.

        Shares and pins go on until they end; then the pool `is_idle` and its memory can be closed.
        """
        if self.is_retired:
            return
        self.is_retired = True
        self.lose_writer()
        for extent in list(self._extents.values()):
            if extent.state is CACHED:
                self._end_cached(extent)
                self._on_evict(extent)

    def check(self) -> None:
        """Assert that extents, allocator and counters agree."""
        self._allocator.check()
        placed = dict(self._allocator.extents())
        extents = self._extents
        expected = {offset: self._allocator.round_up(extent.nbytes) for offset, extent in extents.items()}
        assert placed == expected, "the pool's extents and the allocator's differ"
        for offset, extent in extents.items():
            assert (extent.pool, extent.offset) == (self, offset), f"{extent!r} is filed under {offset}"
            assert extent.state is not ExtentState.GONE, f"{extent!r} is still filed"
            assert extent.state is not ExtentState.DEAD or extent.is_busy, f"{extent!r} has no reader and lingers"
            assert extent.state is not ExtentState.WRITING or not extent.is_busy, f"{extent!r} is read while written"
            offered = extent.state is CACHED and not extent.is_busy
            assert self._allocator.is_offered(offset) is offered, f"{extent!r}: offered for eviction is not {offered}"
        leased = sum(extent.nbytes for extent in extents.values() if extent.num_shares)
        assert leased == self.bytes_leased, "bytes_leased differs from the shares"

    def first_share(self, extent: Extent) -> None:
        """The extent had no share, and has one (called by the extent)."""
        self.bytes_leased += extent.nbytes
        if not extent.num_pins:
            self._allocator.keep(extent.offset)

    def last_share(self, extent: Extent) -> None:
        """The extent's last share ended (called by the extent)."""
        self.bytes_leased -= extent.nbytes
        if extent.num_pins:
            return
        if extent.state is CACHED:
            self._allocator.offer(extent.offset, extent.cost_seconds, extent.last_used)
        else:
            self._drop(extent)

    def _unused(self, extent: Extent) -> None:
        if extent.state is CACHED:
            self._allocator.offer(extent.offset, extent.cost_seconds, extent.last_used)
        else:
            self._drop(extent)

    def _evict(self, extent: Extent) -> None:
        assert not extent.is_busy, f"{extent!r} was offered for eviction"
        self._drop(extent)
        self.num_evictions += 1
        self.bytes_evicted += extent.nbytes
        self._on_evict(extent)

    def _end_cached(self, extent: Extent) -> None:
        if extent.is_busy:
            extent.move(ExtentState.DEAD)
        else:
            self._drop(extent)

    def _drop(self, extent: Extent) -> None:
        extent.move(ExtentState.GONE)
        del self._extents[extent.offset]
        self._allocator.free(extent.offset)
