"""Any order of reserving, writing, staging, claiming, reading, failing, closing and dying, against a simple model.

The region is real, mapped by its client for writing and by readers for reading. The client writes only where it may:
into slices that it was given and did not complete. A slice's bytes carry its own tag from then on, and as long as a
reader is at work, or may come, the tag must be there: bytes that were given away too early would show.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ipc.errors import BadTransition, ExtentTooLarge, SliceGone
from ipc.memory_shm import ReadOnlyRegion, SharedRegion
from ipc.shares import HolderState
from ipc.staging import Staged, StagedState, Staging
from tests.ipc.model import PICKS, pick

CAPACITY = 4096


@dataclass(eq=False)
class Slice:
    """A slice and what the model knows of it."""

    staged: Staged
    tag: int
    state: StagedState = StagedState.WRITING
    num_claimed: int = 0

    @property
    def size(self) -> int:
        return -(-self.staged.nbytes // 256) * 256

    @property
    def is_over(self) -> bool:
        return self.state in {StagedState.QUARANTINED, StagedState.GONE}


class StagingMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.num_tags = 0
        self.region: SharedRegion | None = None
        self.connect()

    def connect(self) -> None:
        """A new client with a region of its own."""
        if self.region is not None:
            self.region.close()
        self.region = SharedRegion.create("staging", CAPACITY)
        self.region.seal_resize()
        self.client = SharedRegion.attach(self.region.fd)
        self.reader = ReadOnlyRegion.attach(self.region.fd)
        self.staging = Staging(CAPACITY, clock=self.tick)
        self.owner = HolderState.CONNECTED
        self.slices: list[Slice] = []  # ever
        self.counts = dict.fromkeys(("staged", "reads", "unread", "cancelled", "failed", "died"), 0)

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def live(self) -> list[Slice]:
        return [slice_ for slice_ in self.slices if slice_.state is not StagedState.GONE]

    def write(self, slice_: Slice) -> None:
        """The client's write, with the tag of the slice."""
        self.client.array(slice_.staged.offset, slice_.staged.nbytes)[:] = slice_.tag

    def likely(self, state: StagedState, index: int) -> Slice:
        """One of the latest slices, of that state if there is one."""
        return pick([slice_ for slice_ in self.slices if slice_.state is state] or self.slices, index)

    @rule(nbytes=st.integers(1, CAPACITY // 2), consumers=st.integers(1, 3), is_complete=st.booleans())
    def reserve(self, nbytes: int, consumers: int, is_complete: bool) -> None:
        if self.owner is not HolderState.CONNECTED:
            with pytest.raises(BadTransition):
                self.staging.reserve(nbytes, consumers)
            return
        staged = self.staging.reserve(nbytes, consumers)
        if staged is None:
            assert self.largest_gap() < nbytes
            return
        assert staged.reserved_at == self.now
        self.num_tags = self.num_tags % 250 + 1
        self.slices.append(Slice(staged, self.num_tags))
        self.write(self.slices[-1])
        if is_complete:
            self.complete(0)

    def largest_gap(self) -> int:
        position, largest = 0, 0
        for slice_ in sorted(self.live(), key=lambda slice_: slice_.staged.offset):
            largest = max(largest, slice_.staged.offset - position)
            position = slice_.staged.offset + slice_.size
        return max(largest, CAPACITY - position)

    @precondition(lambda self: self.owner is HolderState.CONNECTED)
    @rule()
    def reserve_too_large(self) -> None:
        with pytest.raises(ExtentTooLarge):
            self.staging.reserve(CAPACITY + 1)

    @precondition(lambda self: self.slices)
    @rule(index=PICKS)
    def complete(self, index: int) -> None:
        slice_ = pick(self.slices, index)
        if slice_.state is not StagedState.WRITING:
            with pytest.raises(BadTransition):
                slice_.staged.complete()
            return
        self.write(slice_)
        slice_.staged.complete()
        slice_.state = StagedState.STAGED
        self.counts["staged"] += 1

    @precondition(lambda self: self.slices)
    @rule(index=PICKS)
    def claim(self, index: int) -> None:
        slice_ = pick(self.slices, index)
        if slice_.state is StagedState.WRITING:
            with pytest.raises(BadTransition):
                slice_.staged.claim()
        elif slice_.is_over or slice_.num_claimed == slice_.staged.consumers:
            with pytest.raises(SliceGone):
                slice_.staged.claim()
        else:
            slice_.staged.claim()
            slice_.num_claimed += 1

    @precondition(lambda self: self.slices)
    @rule(index=PICKS)
    def begin_read(self, index: int) -> None:
        slice_ = self.likely(StagedState.STAGED, index)
        if slice_.state is not StagedState.STAGED:
            with pytest.raises(SliceGone if slice_.is_over else BadTransition):
                slice_.staged.begin_read()
            return
        slice_.staged.begin_read()
        slice_.state = StagedState.READING
        self.counts["reads"] += 1

    @precondition(lambda self: self.slices)
    @rule(index=PICKS)
    def end_read(self, index: int) -> None:
        slice_ = self.likely(StagedState.READING, index)
        if slice_.state is not StagedState.READING:
            with pytest.raises(BadTransition):
                slice_.staged.end_read()
            return
        slice_.staged.end_read()
        slice_.state = StagedState.GONE

    @precondition(lambda self: self.slices)
    @rule(index=PICKS, state=st.sampled_from(StagedState), ending=st.sampled_from(["acknowledge", "cancel", "fail"]))
    def end(self, index: int, state: StagedState, ending: str) -> None:
        slice_ = self.likely(state, index)
        ends, counter = {
            "acknowledge": ({StagedState.STAGED}, "unread"),
            "cancel": ({StagedState.WRITING, StagedState.STAGED}, "cancelled"),
            "fail": ({StagedState.STAGED, StagedState.READING}, "failed"),
        }[ending]
        assert getattr(slice_.staged, ending)() == (slice_.state in ends)
        if slice_.state in ends:
            self.counts[counter] += 1
            slice_.state = StagedState.GONE

    @precondition(lambda self: self.slices)
    @rule(dies=st.booleans())
    def leave(self, dies: bool) -> None:
        allowed = {HolderState.CONNECTED} | ({HolderState.QUARANTINED} if dies else set())
        move = self.staging.end_all if dies else self.staging.quarantine
        if self.owner not in allowed:
            with pytest.raises(BadTransition):
                move()
            return
        move()
        self.owner = HolderState.DEAD if dies else HolderState.QUARANTINED
        for slice_ in self.live():
            if slice_.state is not StagedState.READING:
                self.counts["died"] += not slice_.is_over
                is_kept = slice_.state is StagedState.WRITING and not dies
                slice_.state = StagedState.QUARANTINED if is_kept else StagedState.GONE

    @precondition(lambda self: self.owner is HolderState.DEAD and self.staging.is_idle)
    @rule()
    def next_client(self) -> None:
        self.connect()

    @invariant()
    def everything_agrees(self) -> None:
        self.staging.check()
        live = self.live()
        assert list(self.staging.slices()) == [slice_.staged for slice_ in live]
        assert self.staging.is_idle == (not live)
        for slice_ in self.slices:
            assert (slice_.staged.state, slice_.staged.num_claimed) == (slice_.state, slice_.num_claimed)
        assert self.staging.bytes_used == sum(slice_.size for slice_ in live)
        assert sum(free for _, free in self.staging.free_runs()) == CAPACITY - self.staging.bytes_used
        held = [slice_.size for slice_ in live if slice_.state is StagedState.QUARANTINED]
        assert self.staging.bytes_quarantined == sum(held)
        assert {name: getattr(self.staging, f"num_{name}") for name in self.counts} == self.counts

    @invariant()
    def no_bytes_were_given_away_too_early(self) -> None:
        for slice_ in self.live():
            view = self.reader.view(slice_.staged.offset, slice_.staged.nbytes)
            assert (view == slice_.tag).all(), f"{slice_.staged!r} was overwritten"

    def teardown(self) -> None:
        self.client.close()
        if self.region is not None:
            self.region.close()


IS_SOAK = bool(os.environ.get("MMCACHE_SOAK"))
TestStaging = StagingMachine.TestCase
TestStaging.settings = settings(
    max_examples=1000 if IS_SOAK else 150, stateful_step_count=200 if IS_SOAK else 50, deadline=None
)
