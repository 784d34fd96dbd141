"""Deferred slices: bytes that a client puts into a region of its own, to be read once, by one reader, or never.

The client writes, the coordinator says where and keeps the states, whoever needs the bytes reads. Bookkeeping only: no
memory is touched here. The allowed transitions are a table.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Collection, Iterable, Iterator

from ipc.allocator import ALIGNMENT, Allocator
from ipc.errors import BadTransition, ExtentTooLarge, SliceGone
from ipc.shares import HOLDER_TRANSITIONS, HolderState


class StagedState(enum.IntEnum):
    """The life of a staged slice."""

    WRITING = 0  # reserved; its client fills it
    STAGED = 1  # complete; nobody reads it
    READING = 2  # its one reader is at work
    QUARANTINED = 3  # incomplete, the client's socket is closed and its process lives: it may still write
    GONE = 4  # its bytes belong to the region again


STAGED_TRANSITIONS: dict[StagedState, frozenset[StagedState]] = {
    StagedState.WRITING: frozenset({StagedState.STAGED, StagedState.QUARANTINED, StagedState.GONE}),
    StagedState.STAGED: frozenset({StagedState.READING, StagedState.GONE}),
    StagedState.READING: frozenset({StagedState.GONE}),
    StagedState.QUARANTINED: frozenset({StagedState.GONE}),
    StagedState.GONE: frozenset(),
}
LIVE_UNDER: dict[HolderState, frozenset[StagedState]] = {
    HolderState.CONNECTED: frozenset({StagedState.WRITING, StagedState.STAGED, StagedState.READING}),
    HolderState.QUARANTINED: frozenset({StagedState.READING, StagedState.QUARANTINED}),
    HolderState.DEAD: frozenset({StagedState.READING}),
}
"""The states of slices that are not gone, by the state of their client."""


class Staged:
    """A run of bytes in a staging region. Made by `Staging.reserve`; its attributes are for reading.

    Its bytes are not given to another slice before its end, and it does not end while somebody reads it.

    Attributes:
        offset, nbytes: where it lies; `nbytes` is what was asked for, before alignment.
        consumers: how many claims may name it.
        num_claimed: how many have.
        reserved_at: when, on the region's clock, in seconds.
    """

    __slots__ = ("_staging", "consumers", "nbytes", "num_claimed", "offset", "reserved_at", "state")

    def __init__(self, staging: Staging, offset: int, nbytes: int, consumers: int, reserved_at: float) -> None:
        self._staging = staging
        self.offset = offset
        self.nbytes = nbytes
        self.consumers = consumers
        self.num_claimed = 0
        self.reserved_at = reserved_at
        self.state = StagedState.WRITING

    def __repr__(self) -> str:
        claims = f"{self.num_claimed}/{self.consumers}"
        return f"<Staged {self.offset}+{self.nbytes} {self.state.name} claimed={claims}>"

    def complete(self) -> None:
        """The client wrote all of it: WRITING to STAGED. Raises `BadTransition` in any other state."""
        self.move(StagedState.STAGED)
        self._staging.num_staged += 1

    def claim(self) -> None:
        """One of its consumers came.

        Raises `SliceGone` if all of them came before or the slice is over, and `BadTransition` if it is incomplete.
        """
        if self.state is StagedState.WRITING:
            raise BadTransition(f"{self!r} is incomplete; its client has not said that it wrote it")
        if self.state not in {StagedState.STAGED, StagedState.READING}:
            raise SliceGone(f"{self!r} is over; nobody can claim it any more")
        if self.num_claimed == self.consumers:
            raise SliceGone(f"{self!r} was claimed by all its consumers")
        self.num_claimed += 1

    def begin_read(self) -> None:
        """Its one reader begins: STAGED to READING. Raises `SliceGone` if it is over, `BadTransition` if it is read."""
        if self.state in {StagedState.QUARANTINED, StagedState.GONE}:
            raise SliceGone(f"{self!r} is over; there is nothing to read")
        self.move(StagedState.READING)
        self._staging.num_reads += 1

    def end_read(self) -> None:
        """The reader is done with the bytes; the slice is over. Raises `BadTransition` unless it is being read."""
        if self.state is not StagedState.READING:
            raise BadTransition(f"{self!r} is not being read")
        self._staging.drop(self)

    def acknowledge(self) -> bool:
        """No consumer needs the bytes: it ends unread, for all of them. False, and nothing changes, unless STAGED."""
        if self.state is not StagedState.STAGED:
            return False
        self._staging.num_unread += 1
        self._staging.drop(self)
        return True

    def cancel(self) -> bool:
        """The client takes it back, and writes to it no more. False, and nothing changes, unless WRITING or STAGED.

        While it is read nothing changes either: the end of the read ends it.
        """
        if self.state not in {StagedState.WRITING, StagedState.STAGED}:
            return False
        self._staging.num_cancelled += 1
        self._staging.drop(self)
        return True

    def fail(self) -> bool:
        """What needed the bytes failed, and a reader, if there was one, is done with them or dead.

        False, and nothing changes, unless STAGED or READING.
        """
        if self.state not in {StagedState.STAGED, StagedState.READING}:
            return False
        self._staging.num_failed += 1
        self._staging.drop(self)
        return True

    def move(self, to: StagedState) -> None:
        """Change the state (called by its region). Raises `BadTransition` unless the table allows it."""
        if to not in STAGED_TRANSITIONS[self.state]:
            raise BadTransition(f"{self!r} cannot become {to.name}")
        self.state = to


class Staging:
    """The slices in one client's staging region. Not thread-safe: one thread, the coordinator's, uses it.

    Attributes:
        bytes_total: capacity, a multiple of the alignment.
        state: of the client: CONNECTED; QUARANTINED once its socket is closed; DEAD once its process died.
        bytes_quarantined: bytes of slices that a client in quarantine was writing, alignment included.
        num_staged: slices that were completed.
        num_reads: reads that began; never two of one slice.
        num_unread, num_cancelled: slices that were acknowledged unread, and taken back by their client.
        num_failed: slices whose use failed, read or not.
        num_died: slices that ended with their client, by its closed socket or its death, before anybody read them.
    """

    def __init__(self, region_bytes: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._allocator = Allocator(region_bytes, ALIGNMENT)
        self._clock = clock
        self._slices: dict[int, Staged] = {}
        self.bytes_total = self._allocator.capacity_bytes
        self.state = HolderState.CONNECTED
        self.bytes_quarantined = 0
        self.num_staged = 0
        self.num_reads = 0
        self.num_unread = 0
        self.num_cancelled = 0
        self.num_failed = 0
        self.num_died = 0
        self._num_reserved = 0
        self._num_gone = 0

    @property
    def bytes_used(self) -> int:
        """Bytes of slices that are not gone, alignment included."""
        return self._allocator.bytes_used

    @property
    def is_idle(self) -> bool:
        """Whether no slice is left: nobody reads the region, and nobody who is alive has reason to write to it."""
        return not self._slices

    def slices(self) -> Collection[Staged]:
        """The slices that are not gone, oldest first."""
        return list(self._slices.values())

    def reserve(self, nbytes: int, consumers: int = 1) -> Staged | None:
        """A new slice in state WRITING for its client to fill, or None while others leave no room for it.

        Raises `ExtentTooLarge` if it could never fit, and `BadTransition` if the client has left.
        """
        if self.state is not HolderState.CONNECTED:
            raise BadTransition(f"the client is {self.state.name}; nothing is staged for it")
        if nbytes <= 0 or consumers <= 0:
            raise ValueError(f"nbytes and consumers must be positive, got {nbytes} and {consumers}")
        if self._allocator.round_up(nbytes) > self.bytes_total:
            raise ExtentTooLarge(f"{nbytes} bytes can never fit into a staging region of {self.bytes_total} bytes")
        offset = self._allocator.allocate(nbytes)
        if offset is None:
            return None
        staged = self._slices[offset] = Staged(self, offset, nbytes, consumers, self._clock())
        self._num_reserved += 1
        return staged

    def could_fit(self, nbytes: int, beside: Collection[Staged]) -> bool:
        """Whether there would be room for `nbytes` if no slices were left but these."""
        size = self._allocator.round_up(nbytes)
        places = [(staged.offset, self._allocator.round_up(staged.nbytes)) for staged in beside]
        return any(free >= size for _, free in _free_runs(places, self.bytes_total))

    def free_runs(self) -> list[tuple[int, int]]:
        """Offset and bytes of every run in which no slice lies, lowest first."""
        return list(_free_runs(self._allocator.extents(), self.bytes_total))

    def quarantine(self) -> None:
        """The client's socket closed and its process lives: nothing more is read or reserved.

        What it was writing it may go on writing, and is kept until it dies. What it had completed ends, a read that
        began at the end of the read. Raises `BadTransition` if the client has left already.
        """
        self._leave(HolderState.QUARANTINED)
        for staged in self.slices():
            if staged.state is not StagedState.READING:
                self.num_died += 1
                if staged.state is StagedState.WRITING:
                    staged.move(StagedState.QUARANTINED)
                    self.bytes_quarantined += self._allocator.round_up(staged.nbytes)
                else:
                    self.drop(staged)

    def end_all(self) -> None:
        """The client's process died: every slice ends, those that are read at the end of their read.

        Raises `BadTransition` the second time.
        """
        self._leave(HolderState.DEAD)
        for staged in self.slices():
            if staged.state is not StagedState.READING:
                self.num_died += staged.state is not StagedState.QUARANTINED
                self.drop(staged)

    def check(self) -> None:
        """Assert that slices, allocator, states and counters agree."""
        self._allocator.check()
        placed = dict(self._allocator.extents())
        expected = {offset: self._allocator.round_up(staged.nbytes) for offset, staged in self._slices.items()}
        assert placed == expected, "the region's slices and the allocator's differ"
        for offset, staged in self._slices.items():
            assert staged.offset == offset, f"{staged!r} is filed under {offset}"
            assert staged.state in LIVE_UNDER[self.state], f"{staged!r} does not go with a client {self.state.name}"
            assert 0 <= staged.num_claimed <= staged.consumers, f"{staged!r} was claimed too often"
        held = sum(placed[staged.offset] for staged in self.slices() if staged.state is StagedState.QUARANTINED)
        assert held == self.bytes_quarantined, "bytes_quarantined differs from the slices"
        assert self._num_reserved == self._num_gone + len(self._slices), "a slice is lost"
        assert self.num_reads <= self.num_staged <= self._num_reserved, "more reads than slices, or more than reserved"

    def drop(self, staged: Staged) -> None:
        """A slice ends (called by the slice)."""
        size = self._allocator.round_up(staged.nbytes)
        if staged.state is StagedState.QUARANTINED:
            self.bytes_quarantined -= size
        staged.move(StagedState.GONE)
        del self._slices[staged.offset]
        self._allocator.free(staged.offset)
        self._num_gone += 1

    def _leave(self, to: HolderState) -> None:
        if to not in HOLDER_TRANSITIONS[self.state]:
            raise BadTransition(f"a client that is {self.state.name} cannot become {to.name}")
        self.state = to


def _free_runs(places: Iterable[tuple[int, int]], capacity: int) -> Iterator[tuple[int, int]]:
    """Offset and bytes of what lies between places, which are such pairs too."""
    end = 0
    for offset, nbytes in sorted(places):
        if offset > end:
            yield end, offset - end
        end = offset + nbytes
    if capacity > end:
        yield end, capacity - end
