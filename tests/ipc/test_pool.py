"""The pool: states of extents, admission before eviction, and no reuse under a reader."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from ipc.control import ControlMemory
from ipc.errors import BadTransition, ExtentTooLarge
from ipc.extents import EXTENT_TRANSITIONS
from ipc.leases import Holder
from ipc.pool import Extent, ExtentState, Pool
from ipc.shares import ShareState

KIB = 1024


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


class Fixture:
    """A pool of 8 KiB, what it evicted, and a connected holder."""

    def __init__(self) -> None:
        self.evicted: list[Extent] = []
        self.pool = Pool(3, 8 * KIB, clock=Clock(), on_evict=self.evicted.append)
        self.holder = Holder(ControlMemory.create(64), "engine", 1)

    def reserve(self, nbytes: int = KIB) -> Extent:
        extent = self.pool.reserve(nbytes)
        assert extent is not None
        return extent

    def cached(self, nbytes: int = KIB, cost_seconds: float = 1.0) -> Extent:
        extent = self.reserve(nbytes)
        self.pool.publish(extent, b"key%d" % extent.offset, cost_seconds, None)
        return extent

    def filled(self, num_extents: int = 8) -> list[Extent]:
        return [self.cached(8 * KIB // num_extents) for _ in range(num_extents)]

    def lease(self, extent: Extent) -> Callable[[], None]:
        share = self.pool.grant(extent, self.holder)

        def release() -> None:
            assert self.holder.acknowledge(share.slot, share.generation)

        return release


@pytest.fixture
def fixture() -> Fixture:
    return Fixture()


def test_an_extent_goes_from_writing_to_cached(fixture: Fixture) -> None:
    extent = fixture.reserve(1000)
    assert (extent.pool_id, extent.offset, extent.nbytes, extent.state) == (3, 0, 1000, ExtentState.WRITING)
    assert (extent.key, extent.num_shares, extent.num_pins) == (None, 0, 0)
    info = object()
    fixture.pool.publish(extent, b"key", 0.25, info)
    assert (extent.state, extent.key, extent.cost_seconds, extent.info) == (ExtentState.CACHED, b"key", 0.25, info)
    assert (fixture.pool.bytes_used, fixture.pool.num_extents, fixture.pool.bytes_total) == (1024, 1, 8 * KIB)
    fixture.pool.check()


def test_an_abandoned_extent_is_free_again(fixture: Fixture) -> None:
    extent = fixture.reserve(8 * KIB)
    fixture.pool.abandon(extent)
    assert extent.state is ExtentState.GONE
    assert fixture.reserve(8 * KIB).offset == 0
    assert fixture.evicted == []


def test_room_is_made_by_evicting_cached_extents(fixture: Fixture) -> None:
    extents = fixture.filled()
    fixture.pool.touch(extents[0])
    new = fixture.reserve(2 * KIB)
    assert fixture.evicted == extents[1:3]
    assert new.offset == extents[1].offset
    assert all(extent.state is ExtentState.GONE for extent in fixture.evicted)
    assert (fixture.pool.num_evictions, fixture.pool.bytes_evicted) == (2, 2 * KIB)
    fixture.pool.check()


def test_an_oversize_extent_is_refused_and_evicts_nothing(fixture: Fixture) -> None:
    fixture.filled()
    with pytest.raises(ExtentTooLarge, match="8193 bytes can never fit into pool 3 of 8192 bytes"):
        fixture.pool.reserve(8 * KIB + 1)
    with pytest.raises(ValueError, match="positive"):
        fixture.pool.reserve(0)
    assert (fixture.evicted, fixture.pool.num_extents) == ([], 8)


def test_a_request_that_cannot_be_met_now_evicts_nothing(fixture: Fixture) -> None:
    extents = fixture.filled()
    release = fixture.lease(extents[4])
    assert fixture.pool.reserve(5 * KIB) is None
    assert (fixture.evicted, fixture.pool.num_refused, fixture.pool.num_evictions) == ([], 1, 0)
    release()
    assert fixture.pool.reserve(5 * KIB) is not None


@pytest.mark.parametrize("busy", ["leased", "pinned", "writing"])
def test_busy_extents_are_not_evicted(fixture: Fixture, busy: str) -> None:
    extents = fixture.filled(2)
    if busy == "leased":
        fixture.lease(extents[0])
    elif busy == "pinned":
        fixture.pool.pin(extents[0])
    else:
        fixture.pool.discard(extents[0])
        extents[0] = fixture.reserve(4 * KIB)
    assert fixture.reserve(4 * KIB).offset == extents[1].offset
    assert fixture.pool.reserve(1) is None
    fixture.pool.check()


def test_shares_and_pins_are_counted_and_bytes_are_leased_once(fixture: Fixture) -> None:
    extent = fixture.cached(1000)
    first, second = fixture.lease(extent), fixture.lease(extent)
    fixture.pool.pin(extent)
    assert (extent.num_shares, extent.num_pins, fixture.pool.bytes_leased) == (2, 1, 1000)
    first()
    assert fixture.pool.bytes_leased == 1000
    second()
    assert (extent.num_shares, fixture.pool.bytes_leased) == (0, 0)
    assert fixture.pool.reserve(8 * KIB) is None
    fixture.pool.unpin(extent)
    assert fixture.pool.reserve(8 * KIB) is not None


@pytest.mark.parametrize("last", ["share", "pin"])
def test_a_discarded_extent_stays_until_its_last_reader_is_done(fixture: Fixture, last: str) -> None:
    extent = fixture.cached(8 * KIB)
    release = fixture.lease(extent)
    fixture.pool.pin(extent)
    fixture.pool.discard(extent)
    assert extent.state is ExtentState.DEAD
    with pytest.raises(BadTransition, match="may not be leased"):
        fixture.pool.grant(extent, fixture.holder)
    with pytest.raises(BadTransition, match="cannot be pinned"):
        fixture.pool.pin(extent)
    ends = [release, lambda: fixture.pool.unpin(extent)]
    for end in ends if last == "pin" else reversed(ends):
        assert fixture.pool.reserve(1) is None
        fixture.pool.check()
        end()
    assert extent.state is ExtentState.GONE
    assert fixture.reserve(8 * KIB).offset == 0
    assert fixture.evicted == []


def test_quarantined_shares_hold_their_extents_until_death(fixture: Fixture) -> None:
    extent = fixture.cached(8 * KIB)
    share = fixture.pool.grant(extent, fixture.holder)
    fixture.holder.quarantine()
    assert share.state is ShareState.QUARANTINED
    assert fixture.pool.reserve(1) is None
    fixture.holder.end_all()
    assert fixture.pool.reserve(1) is not None


def test_a_lease_counts_as_use_and_so_does_a_touch(fixture: Fixture) -> None:
    extents = fixture.filled()
    fixture.lease(extents[0])()
    fixture.pool.touch(extents[1])
    fixture.reserve(KIB)
    assert fixture.evicted == [extents[2]]
    assert extents[1].last_used > extents[7].last_used


def test_what_is_dear_to_make_again_stays_longer(fixture: Fixture) -> None:
    costs = [5.0, 5.0, 5.0, 0.1, 5.0, 5.0, 5.0, 5.0]
    extents = [fixture.cached(cost_seconds=cost) for cost in costs]
    fixture.reserve(KIB)
    assert fixture.evicted == [extents[3]]


def test_retire_evicts_the_cached_drops_the_unfinished_and_keeps_the_leased(fixture: Fixture) -> None:
    leased, pinned, free, writing = fixture.cached(), fixture.cached(), fixture.cached(), fixture.reserve()
    release = fixture.lease(leased)
    fixture.pool.pin(pinned)
    fixture.pool.retire()
    fixture.pool.retire()
    assert fixture.evicted == [leased, pinned, free]
    assert [extent.state.name for extent in (leased, pinned, free, writing)] == ["DEAD", "DEAD", "GONE", "GONE"]
    assert not fixture.pool.is_idle
    fixture.pool.check()
    release()
    assert not fixture.pool.is_idle
    fixture.pool.unpin(pinned)
    assert fixture.pool.is_idle
    assert (fixture.pool.bytes_used, fixture.pool.bytes_leased) == (0, 0)


def test_a_retired_pool_takes_nothing_and_ends_are_harmless(fixture: Fixture) -> None:
    cached, writing = fixture.cached(), fixture.reserve()
    fixture.pool.retire()
    with pytest.raises(BadTransition, match="retired"):
        fixture.pool.reserve(1)
    with pytest.raises(BadTransition):
        fixture.pool.publish(writing, b"key", 1.0, None)
    with pytest.raises(BadTransition):
        fixture.pool.grant(cached, fixture.holder)
    fixture.pool.abandon(writing)
    fixture.pool.discard(cached)
    assert fixture.pool.is_idle


def test_a_pool_is_idle_while_nothing_is_written_or_read(fixture: Fixture) -> None:
    assert fixture.pool.is_idle
    extent = fixture.reserve()
    assert not fixture.pool.is_idle
    fixture.pool.publish(extent, b"key", 1.0, None)
    assert fixture.pool.is_idle


def test_extents_of_another_pool_are_refused(fixture: Fixture) -> None:
    extent = fixture.cached()
    with pytest.raises(AssertionError, match="not in pool"):
        Fixture().pool.grant(extent, fixture.holder)
    assert extent.num_shares == 0


def test_unpin_needs_a_pin(fixture: Fixture) -> None:
    with pytest.raises(BadTransition, match="no pin"):
        fixture.pool.unpin(fixture.cached())


def in_state(fixture: Fixture, state: ExtentState) -> Extent:
    extent = fixture.reserve()
    if state is ExtentState.WRITING:
        return extent
    if state is ExtentState.DEAD:
        fixture.pool.publish(extent, b"key", 1.0, None)
        fixture.lease(extent)
        fixture.pool.discard(extent)
        return extent
    if state is ExtentState.GONE:
        fixture.pool.abandon(extent)
    else:
        fixture.pool.publish(extent, b"key", 1.0, None)
    return extent


def test_every_operation_is_allowed_in_the_states_it_belongs_to_and_no_other(fixture: Fixture) -> None:
    pool, holder = fixture.pool, fixture.holder
    allowed: dict[str, tuple[Callable[[Extent], object], ExtentState]] = {
        "publish": (lambda extent: pool.publish(extent, b"key", 1.0, None), ExtentState.WRITING),
        "abandon": (pool.abandon, ExtentState.WRITING),
        "discard": (pool.discard, ExtentState.CACHED),
        "pin": (pool.pin, ExtentState.CACHED),
        "grant": (lambda extent: pool.grant(extent, holder), ExtentState.CACHED),
    }
    assert set(EXTENT_TRANSITIONS) == set(ExtentState)
    for state, (name, (operation, origin)) in itertools.product(ExtentState, allowed.items()):
        extent = in_state(fixture, state)
        if state is origin:
            operation(extent)
        else:
            with pytest.raises(BadTransition):
                operation(extent)
            assert extent.state is state, name
        pool.check()
        holder.end_all()
        holder = fixture.holder = Holder(ControlMemory.create(64), "engine", 1)
        for left in list(pool.extents()):
            if left.num_pins:
                pool.unpin(left)
            if left.state is ExtentState.CACHED:
                pool.discard(left)
            elif left.state is ExtentState.WRITING:
                pool.abandon(left)
    assert pool.bytes_used == 0
