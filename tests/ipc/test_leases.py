"""Shares and their holders: every transition, and acknowledgements that must change nothing."""

from __future__ import annotations

import itertools

import pytest

from ipc.control import GENERATION_MAX, ControlMemory
from ipc.errors import BadTransition, ControlExhausted
from ipc.leases import Holder
from ipc.pool import Pool
from ipc.shares import HELD_BY, HOLDER_TRANSITIONS, SHARE_TRANSITIONS, HolderState, ShareState
from tests.ipc.things import Clock, Thing


@pytest.fixture
def control() -> ControlMemory:
    return ControlMemory.create(5)


@pytest.fixture
def client(control: ControlMemory) -> ControlMemory:
    return ControlMemory.attach(control.fd)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def holder(control: ControlMemory, clock: Clock) -> Holder:
    return Holder(control, "engine", 4242, clock=clock)


def test_the_tables_cover_every_state_and_ends_are_final() -> None:
    assert set(SHARE_TRANSITIONS) == set(ShareState)
    assert set(HOLDER_TRANSITIONS) == set(HELD_BY) == set(HolderState)
    for ended in (ShareState.ACKNOWLEDGED, ShareState.DIED):
        assert not SHARE_TRANSITIONS[ended]
    assert not HOLDER_TRANSITIONS[HolderState.DEAD]


def test_a_grant_records_who_what_and_when(holder: Holder) -> None:
    thing = Thing()
    share = holder.grant(thing)
    assert (share.holder, share.extent, share.granted_at) == (holder, thing, 100.0)
    assert (share.slot, share.generation, share.state) == (1, 1, ShareState.HELD)
    assert (thing.num_shares, thing.last_granted) == (1, 100.0)
    assert (holder.num_active, holder.num_granted, holder.bytes_held) == (1, 1, 1000)
    holder.check()


def test_a_word_ends_its_share_at_the_next_sweep(holder: Holder, client: ControlMemory) -> None:
    thing = Thing()
    first, second = holder.grant(thing), holder.grant(thing)
    client.acknowledge(second.slot, second.generation)
    assert holder.num_active == 2
    assert holder.sweep() == [second]
    assert (second.state, first.state) == (ShareState.ACKNOWLEDGED, ShareState.HELD)
    assert (holder.num_active, holder.num_acknowledged, thing.num_shares) == (1, 1, 1)
    assert holder.sweep() == []
    assert holder.num_strays == 0


def test_a_message_ends_its_share_once(holder: Holder) -> None:
    thing = Thing()
    share = holder.grant(thing)
    assert holder.acknowledge(share.slot, share.generation)
    assert thing.num_shares == 0
    assert not holder.acknowledge(share.slot, share.generation)
    assert (holder.num_acknowledged, holder.num_strays, thing.num_shares) == (1, 1, 0)


def test_a_reused_slot_has_a_new_generation_and_late_words_miss_it(holder: Holder, client: ControlMemory) -> None:
    old = holder.grant(Thing())
    holder.acknowledge(old.slot, old.generation)
    thing = Thing()
    new = holder.grant(thing)
    assert new.slot == old.slot
    assert new.generation == old.generation + 1
    client.acknowledge(old.slot, old.generation)
    assert holder.sweep() == []
    assert not holder.acknowledge(old.slot, old.generation)
    assert (new.state, thing.num_shares, holder.num_strays) == (ShareState.HELD, 1, 2)
    client.acknowledge(new.slot, new.generation)
    assert holder.sweep() == [new]


def test_a_word_written_before_its_grant_acknowledges_nothing(holder: Holder, client: ControlMemory) -> None:
    for slot in range(1, 5):
        client.acknowledge(slot, 1)
    thing = Thing()
    share = holder.grant(thing)
    assert holder.sweep() == []
    assert share.state is ShareState.HELD
    client.acknowledge(share.slot, share.generation)
    assert holder.sweep() == [share]


def test_a_word_and_a_message_for_one_share_count_once(holder: Holder, client: ControlMemory) -> None:
    share = holder.grant(Thing())
    client.acknowledge(share.slot, share.generation)
    assert holder.acknowledge(share.slot, share.generation)
    assert holder.sweep() == []
    assert (holder.num_acknowledged, holder.num_strays, holder.num_active) == (1, 1, 0)


@pytest.mark.parametrize(
    ("slot", "generation"), [(0, 0), (0, 1), (1, 0), (1, 2), (2, 1), (4, 1), (5, 1), (-1, 1), (2**40, 1)]
)
def test_foreign_acknowledgements_change_nothing(holder: Holder, slot: int, generation: int) -> None:
    share = holder.grant(Thing())
    assert not holder.acknowledge(slot, generation)
    assert (share.state, holder.num_strays) == (ShareState.HELD, 1)
    holder.check()


def test_holders_cannot_end_each_others_shares() -> None:
    mine, yours = (Holder(ControlMemory.create(5), name, 1) for name in ("mine", "yours"))
    share = mine.grant(Thing())
    assert not yours.acknowledge(share.slot, share.generation)
    ControlMemory.attach(yours.control.fd).acknowledge(share.slot, share.generation)
    assert yours.sweep() == []
    assert share.state is ShareState.HELD


def test_running_out_of_words_is_a_typed_error_that_changes_nothing(holder: Holder, client: ControlMemory) -> None:
    shares = [holder.grant(Thing()) for _ in range(4)]
    assert [share.slot for share in shares] == [1, 2, 3, 4]
    thing = Thing()
    with pytest.raises(ControlExhausted, match=r"engine \(pid 4242\) has 4 shares"):
        holder.grant(thing)
    assert thing.num_shares == 0
    holder.check()
    client.acknowledge(3, 1)
    holder.sweep()
    assert holder.grant(thing).slot == 3


def test_a_refused_extent_costs_no_slot(holder: Holder) -> None:
    with pytest.raises(BadTransition, match="not cached"):
        holder.grant(Thing(leasable=False))
    holder.check()
    assert (holder.num_active, holder.num_granted) == (0, 0)
    assert [holder.grant(Thing()).slot for _ in range(4)] == [1, 2, 3, 4]


def test_generations_wrap_past_zero(holder: Holder) -> None:
    share = holder.grant(Thing())
    holder.acknowledge(share.slot, share.generation)
    holder._generations[share.slot] = GENERATION_MAX - 1
    generations = []
    for _ in range(3):
        share = holder.grant(Thing())
        generations.append(share.generation)
        assert holder.acknowledge(share.slot, share.generation)
    assert generations == [GENERATION_MAX, 1, 2]


def test_quarantine_keeps_shares_until_they_are_acknowledged(holder: Holder, client: ControlMemory) -> None:
    thing = Thing()
    by_word, by_message, unread = (holder.grant(thing) for _ in range(3))
    holder.quarantine()
    assert {share.state for share in (by_word, by_message, unread)} == {ShareState.QUARANTINED}
    with pytest.raises(BadTransition, match="QUARANTINED"):
        holder.grant(thing)
    client.acknowledge(by_word.slot, by_word.generation)
    assert holder.sweep() == [by_word]
    assert holder.acknowledge(by_message.slot, by_message.generation)
    assert (holder.num_active, thing.num_shares) == (1, 1)
    assert holder.end_all() == 1
    assert (unread.state, thing.num_shares) == (ShareState.DIED, 0)
    holder.check()


def test_death_ends_every_share(holder: Holder) -> None:
    thing = Thing()
    shares = [holder.grant(thing) for _ in range(3)]
    holder.acknowledge(shares[1].slot, shares[1].generation)
    assert holder.end_all() == 2
    assert [share.state for share in shares] == [ShareState.DIED, ShareState.ACKNOWLEDGED, ShareState.DIED]
    assert (holder.num_died, holder.num_acknowledged, holder.num_active, thing.num_shares) == (2, 1, 0, 0)


def test_acknowledgements_after_death_are_strays(holder: Holder, client: ControlMemory) -> None:
    share = holder.grant(Thing())
    holder.end_all()
    client.acknowledge(share.slot, share.generation)
    assert holder.sweep() == []
    assert not holder.acknowledge(share.slot, share.generation)
    assert holder.num_strays == 2


def test_holder_transitions_that_the_table_forbids_raise() -> None:
    reach = {
        HolderState.CONNECTED: (),
        HolderState.QUARANTINED: (Holder.quarantine,),
        HolderState.DEAD: (Holder.end_all,),
    }
    moves = {HolderState.QUARANTINED: Holder.quarantine, HolderState.DEAD: Holder.end_all}
    for origin, (target, move) in itertools.product(HolderState, moves.items()):
        holder = Holder(ControlMemory.create(2), "table", 1)
        for step in reach[origin]:
            step(holder)
        if target in HOLDER_TRANSITIONS[origin]:
            move(holder)
            assert holder.state is target
        else:
            with pytest.raises(BadTransition):
                move(holder)
            assert holder.state is origin


def test_a_limit_quarantines_one_share_and_it_still_ends_by_its_acknowledgement(
    holder: Holder, client: ControlMemory
) -> None:
    thing = Thing()
    late, prompt = holder.grant(thing), holder.grant(thing)
    late.quarantine()
    assert (late.state, prompt.state) == (ShareState.QUARANTINED, ShareState.HELD)
    assert (holder.num_active, thing.num_shares, holder.state) == (2, 2, HolderState.CONNECTED)
    holder.check()
    assert holder.grant(Thing()).state is ShareState.HELD
    client.acknowledge(late.slot, late.generation)
    assert holder.sweep() == [late]
    assert (late.state, thing.num_shares) == (ShareState.ACKNOWLEDGED, 1)
    holder.check()


def test_only_a_held_share_is_quarantined(holder: Holder) -> None:
    twice, ended = holder.grant(Thing()), holder.grant(Thing())
    twice.quarantine()
    holder.acknowledge(ended.slot, ended.generation)
    for share, state in ((twice, ShareState.QUARANTINED), (ended, ShareState.ACKNOWLEDGED)):
        with pytest.raises(BadTransition, match=state.name):
            share.quarantine()
        assert share.state is state


@pytest.mark.parametrize("dies", [False, True])
def test_a_holder_with_quarantined_shares_leaves_like_any_other(holder: Holder, dies: bool) -> None:
    thing = Thing()
    late, prompt = holder.grant(thing), holder.grant(thing)
    late.quarantine()
    if dies:
        assert holder.end_all() == 2
        assert (late.state, prompt.state, thing.num_shares) == (ShareState.DIED, ShareState.DIED, 0)
    else:
        holder.quarantine()
        assert (late.state, prompt.state) == (ShareState.QUARANTINED, ShareState.QUARANTINED)
        assert holder.acknowledge(late.slot, late.generation)
    holder.check()


def test_shares_older_than_a_time_come_oldest_first_whatever_their_slots(holder: Holder, clock: Clock) -> None:
    shares = []
    for clock.now in (1.0, 2.0, 3.0):
        shares.append(holder.grant(Thing()))
    holder.acknowledge(shares[0].slot, shares[0].generation)
    clock.now = 4.0
    reused = holder.grant(Thing())
    assert reused.slot == shares[0].slot
    assert holder.older_than(2.0) == []
    assert holder.older_than(2.5) == [shares[1]]
    shares[1].quarantine()
    assert holder.older_than(9.0) == [shares[1], shares[2], reused] == holder.shares()


def test_granting_many_at_once_is_granting_one_after_the_other() -> None:
    holder, extents = Holder(ControlMemory.create(6), "reader", 1), [Thing() for _ in range(4)]
    first = holder.grant(extents[0])
    shares = holder.grant_all([*extents, extents[0], extents[1]], holder.now())
    assert [share.extent for share in shares] == extents, "there are words for so many"
    assert holder.num_active == holder.num_granted == 5
    holder.check()
    holder.control.acknowledge(first.slot, first.generation)
    holder.control.acknowledge(shares[2].slot, shares[2].generation)
    assert set(holder.sweep()) == {first, shares[2]}
    assert (holder.num_active, holder.num_acknowledged) == (3, 2)
    again = holder.grant_all(extents[:2], holder.now())
    assert {share.slot for share in again} == {first.slot, shares[2].slot}
    assert all(share.generation == 2 for share in again), "the words are used anew"
    assert holder.sweep() == [], "what was acknowledged before acknowledges nothing of them"
    holder.check()


def test_of_many_none_is_granted_if_one_may_not_be_leased() -> None:
    pool = Pool(1, 1 << 16, on_evict=lambda _: None)
    good, bad = pool.reserve(256), pool.reserve(256)
    assert good is not None
    assert bad is not None
    pool.publish(good, b"good", 1.0, None)
    holder = Holder(ControlMemory.create(8), "reader", 1)
    with pytest.raises(BadTransition):
        holder.grant_all([good, bad], holder.now())
    assert (holder.num_active, holder.num_granted, good.num_shares) == (0, 0, 0)
    holder.check()
    pool.check()
