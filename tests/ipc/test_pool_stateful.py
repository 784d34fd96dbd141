"""Any order of what a pool, its holders and their offers can go through, against a simple model.

`PoolMachine` has the pool and its leases; what is added here are shares for others, and the limit on leases.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from ipc.errors import BadTransition, SliceGone
from ipc.offers import Offer, OfferState
from ipc.pool import ExtentState
from ipc.shares import HolderState, ShareState
from tests.ipc.model import PICKS, Client, pick
from tests.ipc.pool_machine import PoolMachine


class OffersMachine(PoolMachine):
    def __init__(self) -> None:
        self.offers: list[Offer] = []  # ever
        super().__init__()

    def requester(self, offer: Offer) -> Client | None:
        """Whose the offer is, as long as it is open."""
        return next((client for client in self.clients if offer in client.offers), None)

    @precondition(lambda self: self.live)
    @rule(client_index=PICKS, index=PICKS, num_shares=st.integers(1, 3))
    def offer(self, client_index: int, index: int, num_shares: int) -> None:
        client = pick(self.clients, client_index)
        extent = pick(self.in_state(ExtentState.CACHED) or list(self.live), index)
        if client.holder.state is not HolderState.CONNECTED or extent.state is not ExtentState.CACHED:
            with pytest.raises(BadTransition):
                client.holder.offer(extent, num_shares)
            return
        offer = client.holder.offer(extent, num_shares)
        client.offers.append(offer)
        self.offers.append(offer)

    @precondition(lambda self: self.offers)
    @rule(client_index=PICKS, index=PICKS)
    def claim(self, client_index: int, index: int) -> None:
        consumer = pick(self.clients, client_index)
        offer = pick(self.offers, index)
        requester = self.requester(offer)
        unclaimed = offer.num_unclaimed
        error = SliceGone if requester is None else self.refusal(consumer, offer.extent)  # type: ignore[arg-type]
        if error is not None:
            with pytest.raises(error):
                offer.claim(consumer.holder)
            assert offer.num_unclaimed == unclaimed
            return
        share = offer.claim(consumer.holder)
        assert share.extent is offer.extent
        assert offer.num_unclaimed == unclaimed - 1
        consumer.granted_share(share)
        if unclaimed == 1:
            assert requester is not None
            requester.offers.remove(offer)
            assert offer.state is OfferState.CLAIMED

    @precondition(lambda self: self.offers)
    @rule(index=PICKS)
    def cancel(self, index: int) -> None:
        offer = pick(self.offers, index)
        requester = self.requester(offer)
        if requester is None:
            with pytest.raises(BadTransition):
                offer.cancel()
            return
        offer.cancel()
        requester.offers.remove(offer)
        self.settle()

    @rule(client_index=PICKS, age=st.integers(0, 20))
    def limit(self, client_index: int, age: int) -> None:
        """Quarantine what is held for longer than the limit."""
        client = pick(self.clients, client_index)
        limit = self.now - age
        late = client.holder.older_than(limit)
        assert late == [share for share in client.held if share.granted_at < limit]
        for share in late:
            if share.state is ShareState.HELD:
                share.quarantine()
            else:
                with pytest.raises(BadTransition):
                    share.quarantine()

    @invariant()
    def an_offer_is_open_or_over(self) -> None:
        for offer in self.offers:
            assert (offer.state is OfferState.OPEN) == (self.requester(offer) is not None)
            assert offer.num_unclaimed > 0 or offer.state is OfferState.CLAIMED


IS_SOAK = bool(os.environ.get("MMCACHE_SOAK"))
TestPool = OffersMachine.TestCase
TestPool.settings = settings(
    max_examples=1000 if IS_SOAK else 200, stateful_step_count=200 if IS_SOAK else 60, deadline=None
)
