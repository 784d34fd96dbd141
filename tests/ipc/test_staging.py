"""Deferred slices: every transition, one read at most, and no byte given back too early."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from ipc.errors import BadTransition, ExtentTooLarge, SliceGone
from ipc.shares import HOLDER_TRANSITIONS, HolderState
from ipc.staging import LIVE_UNDER, STAGED_TRANSITIONS, Staged, StagedState, Staging
from tests.ipc.things import Clock

KIB = 1024


@pytest.fixture
def staging() -> Staging:
    return Staging(8 * KIB, clock=Clock())


def reserved(staging: Staging, nbytes: int = KIB, consumers: int = 1) -> Staged:
    staged = staging.reserve(nbytes, consumers)
    assert staged is not None
    return staged


def complete(staging: Staging, nbytes: int = KIB, consumers: int = 1) -> Staged:
    staged = reserved(staging, nbytes, consumers)
    staged.complete()
    return staged


def reading(staging: Staging) -> Staged:
    staged = complete(staging)
    staged.begin_read()
    return staged


def test_the_tables_cover_every_state_and_the_end_is_final() -> None:
    assert set(STAGED_TRANSITIONS) == set(StagedState)
    assert not STAGED_TRANSITIONS[StagedState.GONE]
    assert set(LIVE_UNDER) == set(HolderState)
    assert set().union(*LIVE_UNDER.values()) == set(StagedState) - {StagedState.GONE}


def test_a_slice_is_written_staged_read_once_and_gone(staging: Staging) -> None:
    staged = reserved(staging, 1000, consumers=2)
    assert (staged.offset, staged.nbytes, staged.reserved_at) == (0, 1000, 100.0)
    assert (staged.consumers, staged.num_claimed, staged.state) == (2, 0, StagedState.WRITING)
    assert (staging.bytes_used, staging.is_idle, staging.num_staged) == (1024, False, 0)
    staged.complete()
    staged.claim()
    staged.begin_read()
    assert (staged.state, staging.num_staged, staging.num_reads) == (StagedState.READING, 1, 1)
    staging.check()
    staged.end_read()
    assert (staged.state, staging.bytes_used, staging.is_idle) == (StagedState.GONE, 0, True)
    with pytest.raises(BadTransition, match="not being read"):
        staged.end_read()
    assert staging.num_reads == 1
    staging.check()


def test_a_second_reader_is_refused(staging: Staging) -> None:
    staged = reading(staging)
    with pytest.raises(BadTransition, match="READING"):
        staged.begin_read()
    staged.end_read()
    with pytest.raises(SliceGone, match="nothing to read"):
        staged.begin_read()
    assert staging.num_reads == 1


def test_as_many_consumers_claim_as_it_was_made_for(staging: Staging) -> None:
    staged = complete(staging, consumers=3)
    staged.claim()
    staged.begin_read()
    staged.claim()
    staged.claim()
    with pytest.raises(SliceGone, match="all its consumers"):
        staged.claim()
    assert staged.num_claimed == 3
    staging.check()


def test_what_is_incomplete_cannot_be_claimed_or_read(staging: Staging) -> None:
    staged = reserved(staging)
    with pytest.raises(BadTransition, match="incomplete") as caught:
        staged.claim()
    assert not isinstance(caught.value, SliceGone)
    with pytest.raises(BadTransition, match="READING"):
        staged.begin_read()
    assert (staged.state, staged.num_claimed, staging.num_reads) == (StagedState.WRITING, 0, 0)


def test_an_acknowledged_slice_is_freed_unread_for_all(staging: Staging) -> None:
    staged = complete(staging, consumers=8)
    staged.claim()
    assert staged.acknowledge()
    assert not staged.acknowledge()
    with pytest.raises(SliceGone, match="over"):
        staged.claim()
    assert (staging.num_unread, staging.num_reads, staging.bytes_used) == (1, 0, 0)


def test_a_cancel_takes_back_what_is_not_being_read(staging: Staging) -> None:
    writing, staged, read = reserved(staging), complete(staging), reading(staging)
    assert [writing.cancel(), staged.cancel(), read.cancel()] == [True, True, False]
    assert (read.state, staging.num_cancelled, staging.bytes_used) == (StagedState.READING, 2, KIB)
    read.end_read()
    assert not read.cancel()
    assert (staging.num_cancelled, staging.bytes_used) == (2, 0)


def test_a_failure_frees_it_read_or_not(staging: Staging) -> None:
    staged, read, writing = complete(staging), reading(staging), reserved(staging)
    assert [staged.fail(), read.fail(), writing.fail()] == [True, True, False]
    assert not read.fail()
    assert (staged.state, read.state, writing.state) == (StagedState.GONE, StagedState.GONE, StagedState.WRITING)
    assert (staging.num_failed, staging.num_reads) == (2, 1)
    with pytest.raises(BadTransition, match="not being read"):
        read.end_read()
    staging.check()


@pytest.mark.parametrize("step", ["acknowledge", "cancel", "reserve"])
def test_bytes_under_a_reader_are_not_given_away(staging: Staging, step: str) -> None:
    staged = complete(staging, 8 * KIB)
    staged.begin_read()
    if step != "reserve":
        assert not getattr(staged, step)()
    assert staging.reserve(1) is None
    staged.end_read()
    assert reserved(staging, 8 * KIB).offset == 0


def test_no_room_is_none_and_what_never_fits_an_error(staging: Staging) -> None:
    first = complete(staging, 8 * KIB)
    assert staging.reserve(1) is None
    with pytest.raises(ExtentTooLarge, match="8193 bytes can never fit into a staging region of 8192"):
        staging.reserve(8 * KIB + 1)
    for nbytes, consumers in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="positive"):
            staging.reserve(nbytes, consumers)
    staging.check()
    assert staging.slices() == [first]


def test_a_closed_socket_quarantines_what_is_being_written_and_nothing_else(staging: Staging) -> None:
    writing, staged, read = reserved(staging, 100), complete(staging, consumers=2), reading(staging)
    staging.quarantine()
    assert (writing.state, staged.state, read.state) == (
        StagedState.QUARANTINED,
        StagedState.GONE,
        StagedState.READING,
    )
    assert (staging.bytes_quarantined, staging.bytes_used, staging.num_died) == (256, 256 + KIB, 2)
    for refused in (staged.claim, staged.begin_read, writing.begin_read):
        with pytest.raises(SliceGone, match="over"):
            refused()
    assert not any([staged.acknowledge(), staged.cancel(), writing.cancel(), staged.fail(), writing.fail()])
    with pytest.raises(BadTransition, match="QUARANTINED"):
        staging.reserve(1)
    staging.check()
    read.end_read()
    assert (read.state, staging.bytes_used, staging.is_idle) == (StagedState.GONE, 256, False)
    staging.check()
    staging.end_all()
    assert (staging.bytes_used, staging.bytes_quarantined, staging.num_died, staging.is_idle) == (0, 0, 2, True)
    staging.check()


def test_nothing_is_kept_of_a_client_that_was_not_writing(staging: Staging) -> None:
    complete(staging)
    staging.quarantine()
    assert (staging.is_idle, staging.bytes_quarantined, staging.num_died) == (True, 0, 1)


def test_death_frees_all_but_what_is_read(staging: Staging) -> None:
    writing, staged, read = reserved(staging), complete(staging), reading(staging)
    staging.end_all()
    assert (writing.state, staged.state, read.state) == (StagedState.GONE, StagedState.GONE, StagedState.READING)
    assert (staging.num_died, staging.bytes_used, staging.is_idle) == (2, KIB, False)
    with pytest.raises(BadTransition):
        writing.complete()
    staging.check()
    read.end_read()
    assert (read.state, staging.is_idle) == (StagedState.GONE, True)
    staging.check()


def test_a_read_may_fail_under_quarantine_and_after_death() -> None:
    for leave in (Staging.quarantine, Staging.end_all):
        staging = Staging(8 * KIB)
        read = reading(staging)
        leave(staging)
        assert read.fail()
        assert (read.state, staging.num_failed, staging.is_idle) == (StagedState.GONE, 1, True)
        staging.check()


def test_whether_it_could_fit_beside_some(staging: Staging) -> None:
    first, middle, last = reserved(staging, 2 * KIB), reserved(staging, 2 * KIB), reserved(staging, 3 * KIB)
    assert staging.reserve(2 * KIB) is None
    assert staging.could_fit(2 * KIB, [first, middle]), "if the last one ends"
    assert staging.could_fit(4 * KIB, [first])
    assert not staging.could_fit(4 * KIB + 1, [middle]), "in a row"
    assert not staging.could_fit(2 * KIB, [last, first, middle])
    assert staging.could_fit(8 * KIB, [])
    assert not staging.could_fit(8 * KIB + 1, [])


def test_free_runs_are_what_lies_between(staging: Staging) -> None:
    assert staging.free_runs() == [(0, 8 * KIB)]
    _, middle, _ = reserved(staging, 2 * KIB), reserved(staging, 100), reserved(staging)
    middle.cancel()
    assert staging.free_runs() == [(2 * KIB, 256), (2 * KIB + 256 + KIB, 5 * KIB - 256)]
    reserved(staging, 256)
    reserved(staging, 5 * KIB - 256)
    assert staging.free_runs() == []


MOVES: dict[StagedState, Callable[[Staged], object]] = {
    StagedState.STAGED: Staged.complete,
    StagedState.READING: Staged.begin_read,
    StagedState.QUARANTINED: lambda staged: staged.move(StagedState.QUARANTINED),
    StagedState.GONE: lambda staged: staged.move(StagedState.GONE),
}


def reached(state: StagedState) -> Staged:
    staging = Staging(8 * KIB)
    staged = reserved(staging)
    if state in {StagedState.STAGED, StagedState.READING}:
        staged.complete()
    if state is StagedState.READING:
        staged.begin_read()
    elif state is StagedState.QUARANTINED:
        staging.quarantine()
    elif state is StagedState.GONE:
        assert staged.cancel()
    return staged


@pytest.mark.parametrize(("origin", "target"), list(itertools.product(StagedState, MOVES)))
def test_slices_move_as_the_table_says(origin: StagedState, target: StagedState) -> None:
    staged = reached(origin)
    assert staged.state is origin
    if target in STAGED_TRANSITIONS[origin]:
        MOVES[target](staged)
        assert staged.state is target
    else:
        with pytest.raises(BadTransition):
            MOVES[target](staged)
        assert staged.state is origin


def test_a_client_leaves_as_its_table_says() -> None:
    reach = {
        HolderState.CONNECTED: (),
        HolderState.QUARANTINED: (Staging.quarantine,),
        HolderState.DEAD: (Staging.end_all,),
    }
    moves = {HolderState.QUARANTINED: Staging.quarantine, HolderState.DEAD: Staging.end_all}
    for origin, (target, move) in itertools.product(HolderState, moves.items()):
        staging = Staging(KIB)
        for step in reach[origin]:
            step(staging)
        if target in HOLDER_TRANSITIONS[origin]:
            move(staging)
            assert staging.state is target
        else:
            with pytest.raises(BadTransition):
                move(staging)
            assert staging.state is origin


def test_four_pictures_for_eight_ranks_are_read_four_times_on_misses_and_never_on_hits(staging: Staging) -> None:
    for is_hit, num_reads, num_unread in ((False, 4, 0), (True, 4, 4)):
        pictures = [complete(staging, consumers=8) for _ in range(4)]
        for _, picture in itertools.product(range(8), pictures):
            if picture.state is not StagedState.GONE:
                picture.claim()
            if is_hit:
                picture.acknowledge()
            elif picture.state is StagedState.STAGED:
                picture.begin_read()
        for picture in pictures:
            if picture.state is StagedState.READING:
                picture.end_read()
        assert (staging.num_reads, staging.num_unread, staging.bytes_used) == (num_reads, num_unread, 0)
        staging.check()
