"""Offers: shares for others, each claimed once, and no longer there than their requester."""

from __future__ import annotations

import itertools

import pytest

from ipc.control import ControlMemory
from ipc.errors import BadTransition, ControlExhausted, SliceGone
from ipc.leases import Holder
from ipc.offers import OFFER_TRANSITIONS, Offer, OfferState
from ipc.pool import ExtentState, Pool
from ipc.shares import ShareState
from tests.ipc.things import Clock, Thing


def holder(name: str, num_words: int = 8, clock: Clock | None = None) -> Holder:
    return Holder(ControlMemory.create(num_words), name, 1, clock=clock or Clock())


@pytest.fixture
def scheduler() -> Holder:
    return holder("scheduler")


@pytest.fixture
def rank() -> Holder:
    return holder("rank")


def totals(requester: Holder) -> tuple[int, int, int]:
    requester.check()
    return requester.num_offered, requester.num_claimed, requester.num_unclaimed_ended


def test_the_table_covers_every_state_and_ends_are_final() -> None:
    assert set(OFFER_TRANSITIONS) == set(OfferState)
    ends = set(OfferState) - {OfferState.OPEN}
    assert OFFER_TRANSITIONS[OfferState.OPEN] == ends
    assert not any(OFFER_TRANSITIONS[end] for end in ends)


def test_an_offer_keeps_its_extent_without_a_word(scheduler: Holder) -> None:
    thing = Thing()
    offer = scheduler.offer(thing, 8)
    assert (offer.holder, offer.extent, offer.offered_at) == (scheduler, thing, 100.0)
    assert (offer.num_shares, offer.num_unclaimed, offer.state) == (8, 8, OfferState.OPEN)
    assert (thing.num_shares, thing.last_granted) == (1, 100.0)
    assert (scheduler.num_active, scheduler.shares(), scheduler.offers.open()) == (0, [], [offer])
    assert totals(scheduler) == (8, 0, 0)


def test_each_consumer_claims_a_share_of_its_own_and_the_last_ends_the_offer(scheduler: Holder) -> None:
    thing = Thing()
    offer = scheduler.offer(thing, 3)
    ranks = [holder(f"rank{index}") for index in range(3)]
    shares = [offer.claim(rank) for rank in ranks]
    assert [share.holder for share in shares] == ranks
    assert all(share.extent is thing and share.state is ShareState.HELD for share in shares)
    assert (offer.state, offer.num_unclaimed, thing.num_shares) == (OfferState.CLAIMED, 0, 3)
    assert scheduler.offers.open() == []
    assert totals(scheduler) == (3, 3, 0)
    for share in shares:
        assert share.holder.acknowledge(share.slot, share.generation)
    assert thing.num_shares == 0


def test_one_claim_too_many_is_refused(scheduler: Holder, rank: Holder) -> None:
    offer = scheduler.offer(Thing(), 1)
    offer.claim(rank)
    with pytest.raises(SliceGone, match="CLAIMED unclaimed=0/1"):
        offer.claim(rank)
    assert (rank.num_active, totals(scheduler)) == (1, (1, 1, 0))


def test_a_requester_may_claim_of_its_own_offer(scheduler: Holder) -> None:
    share = scheduler.offer(Thing(), 1).claim(scheduler)
    assert scheduler.shares() == [share]
    assert totals(scheduler) == (1, 1, 0)


def test_a_cancel_ends_what_is_unclaimed_and_nothing_else(scheduler: Holder, rank: Holder) -> None:
    thing = Thing()
    offer = scheduler.offer(thing, 4)
    share = offer.claim(rank)
    offer.cancel()
    assert (offer.state, share.state, thing.num_shares) == (OfferState.CANCELLED, ShareState.HELD, 1)
    assert totals(scheduler) == (4, 1, 3)
    with pytest.raises(SliceGone, match="CANCELLED"):
        offer.claim(rank)
    assert totals(scheduler) == (4, 1, 3)


@pytest.mark.parametrize("leave", [Holder.quarantine, Holder.end_all])
def test_what_is_unclaimed_goes_with_the_requester(scheduler: Holder, rank: Holder, leave: object) -> None:
    thing = Thing()
    offer, other = scheduler.offer(thing, 2), scheduler.offer(thing, 1)
    share = offer.claim(rank)
    leave(scheduler)  # type: ignore[operator]
    assert (offer.state, other.state) == (OfferState.DIED, OfferState.DIED)
    assert (share.state, thing.num_shares) == (ShareState.HELD, 1)
    assert totals(scheduler) == (3, 1, 2)
    with pytest.raises(SliceGone, match="DIED"):
        other.claim(rank)
    with pytest.raises(BadTransition, match="gets no shares"):
        scheduler.offer(thing, 1)
    assert thing.num_shares == 1


def test_a_requester_that_was_quarantined_and_died_ends_its_offers_once(scheduler: Holder) -> None:
    thing = Thing()
    scheduler.offer(thing, 5)
    scheduler.quarantine()
    scheduler.end_all()
    assert (thing.num_shares, totals(scheduler)) == (0, (5, 0, 5))


def test_a_claim_that_is_refused_claims_nothing(scheduler: Holder) -> None:
    thing = Thing()
    offer = scheduler.offer(thing, 2)
    full, gone = holder("full", num_words=2), holder("gone")
    full.grant(Thing())
    gone.end_all()
    for consumer, error in ((full, ControlExhausted), (gone, BadTransition)):
        with pytest.raises(error):
            offer.claim(consumer)
    thing.leasable = False
    with pytest.raises(BadTransition, match="not cached"):
        offer.claim(holder("late"))
    assert (offer.state, offer.num_unclaimed, thing.num_shares) == (OfferState.OPEN, 2, 1)
    assert totals(scheduler) == (2, 0, 0)


def test_an_offer_that_is_refused_leaves_nothing(scheduler: Holder) -> None:
    thing = Thing(leasable=False)
    with pytest.raises(BadTransition, match="not cached"):
        scheduler.offer(thing, 1)
    with pytest.raises(ValueError, match="num_shares"):
        scheduler.offer(Thing(), 0)
    assert (thing.num_shares, scheduler.offers.open(), totals(scheduler)) == (0, [], (0, 0, 0))


def reached(state: OfferState) -> Offer:
    requester = holder("table")
    offer = requester.offer(Thing(), 1)
    if state is OfferState.CLAIMED:
        offer.claim(holder("consumer"))
    elif state is OfferState.CANCELLED:
        offer.cancel()
    elif state is OfferState.DIED:
        requester.end_all()
    return offer


@pytest.mark.parametrize(("origin", "target"), list(itertools.product(OfferState, OfferState)))
def test_offers_move_as_the_table_says(origin: OfferState, target: OfferState) -> None:
    offer = reached(origin)
    assert offer.state is origin
    if target in OFFER_TRANSITIONS[origin]:
        offer.move(target)
        assert offer.state is target
    else:
        with pytest.raises(BadTransition, match=f"{origin.name}.*cannot become {target.name}"):
            offer.move(target)
        assert offer.state is origin


def test_an_extent_on_offer_is_not_evicted_and_one_that_was_discarded_is_not_claimed(
    scheduler: Holder, rank: Holder
) -> None:
    pool = Pool(1, 1024, on_evict=lambda _: None)
    extent = pool.reserve(1024)
    assert extent is not None
    pool.publish(extent, b"key", 1.0, None)
    offer = scheduler.offer(extent, 2)
    assert pool.reserve(1024) is None
    offer.claim(rank)
    pool.discard(extent)
    with pytest.raises(BadTransition, match="may not be leased"):
        offer.claim(rank)
    offer.cancel()
    assert extent.state is ExtentState.DEAD
    rank.end_all()
    assert extent.state is ExtentState.GONE
    pool.check()
