"""Offers: shares that a holder sets aside for other processes, until each of them comes for its own.

An offer keeps its extent like a share, and counts once however many shares it has. It needs no word of control memory,
since nobody can read under it: whoever claims of it gets a share of their own. What nobody claimed ends with the
requester, or by its cancel. The allowed transitions are a table.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from ipc.errors import BadTransition, SliceGone

if TYPE_CHECKING:
    from collections.abc import Collection

    from ipc.leases import Holder
    from ipc.shares import Leasable, Share


class OfferState(enum.IntEnum):
    """The life of an offer."""

    OPEN = 0
    CLAIMED = 1  # by all it was made for
    CANCELLED = 2
    DIED = 3  # with its requester, whose socket is closed or whose process died


OFFER_TRANSITIONS: dict[OfferState, frozenset[OfferState]] = {
    OfferState.OPEN: frozenset({OfferState.CLAIMED, OfferState.CANCELLED, OfferState.DIED}),
    OfferState.CLAIMED: frozenset(),
    OfferState.CANCELLED: frozenset(),
    OfferState.DIED: frozenset(),
}


class Offer:
    """Shares on one extent for consumers that did not come yet. Made by `Holder.offer`.

    Attributes:
        holder: the requester, with which the offer ends.
        num_shares, num_unclaimed: what it was made for, and what is left of it.
        offered_at: when, on the requester's clock, in seconds.
    """

    __slots__ = ("_offers", "extent", "holder", "num_shares", "num_unclaimed", "offered_at", "state")

    def __init__(self, offers: Offers, holder: Holder, extent: Leasable, num_shares: int, offered_at: float) -> None:
        self._offers = offers
        self.holder = holder
        self.extent = extent
        self.num_shares = num_shares
        self.num_unclaimed = num_shares
        self.offered_at = offered_at
        self.state = OfferState.OPEN

    def __repr__(self) -> str:
        return f"<Offer of {self.holder.name} {self.state.name} unclaimed={self.num_unclaimed}/{self.num_shares}>"

    def claim(self, consumer: Holder) -> Share:
        """Begin a share of `consumer`, in its control memory. The last claim ends the offer.

        Raises `SliceGone` if the offer is over, and whatever `Holder.grant` raises; nothing is claimed then.
        """
        if self.state is not OfferState.OPEN:
            raise SliceGone(f"{self!r} is over; nothing can be claimed of it")
        share = consumer.grant(self.extent)
        self.num_unclaimed -= 1
        self._offers.num_claimed += 1
        if not self.num_unclaimed:
            self._offers.end(self, OfferState.CLAIMED)
        return share

    def cancel(self) -> None:
        """End what is unclaimed; claimed shares go on. Raises `BadTransition` if the offer is over already."""
        self._offers.end(self, OfferState.CANCELLED)

    def move(self, to: OfferState) -> None:
        """Change the state (called by its holder's offers). Raises `BadTransition` unless the table allows it."""
        if to not in OFFER_TRANSITIONS[self.state]:
            raise BadTransition(f"{self!r} cannot become {to.name}")
        self.state = to


class Offers:
    """The offers of one holder.

    Attributes:
        num_offered, num_claimed, num_unclaimed_ended: totals of shares: offered, claimed, and ended without a claim.
    """

    __slots__ = ("_open", "num_claimed", "num_offered", "num_unclaimed_ended")

    def __init__(self) -> None:
        self.num_offered = 0
        self.num_claimed = 0
        self.num_unclaimed_ended = 0
        self._open: dict[Offer, None] = {}

    def add(self, holder: Holder, extent: Leasable, num_shares: int, now: float) -> Offer:
        """Begin an offer. See `Holder.offer` for the errors."""
        if num_shares <= 0:
            raise ValueError(f"num_shares must be positive, got {num_shares}")
        extent.share_granted(now)
        offer = Offer(self, holder, extent, num_shares, now)
        self._open[offer] = None
        self.num_offered += num_shares
        return offer

    def end(self, offer: Offer, state: OfferState) -> None:
        """End an open offer (called by the offer)."""
        offer.move(state)
        del self._open[offer]
        self.num_unclaimed_ended += offer.num_unclaimed
        offer.extent.share_ended()

    def end_all(self) -> None:
        """The requester left: what is unclaimed ends."""
        for offer in list(self._open):
            self.end(offer, OfferState.DIED)

    def open(self) -> Collection[Offer]:
        """The offers that are not over, oldest first."""
        return list(self._open)

    def check(self) -> None:
        """Assert that offers and counters agree."""
        for offer in self._open:
            assert offer.state is OfferState.OPEN, f"{offer!r} is over and kept"
            assert 0 < offer.num_unclaimed <= offer.num_shares, f"{offer!r} is open, and miscounted"
        unclaimed = sum(offer.num_unclaimed for offer in self._open)
        ended = self.num_claimed + self.num_unclaimed_ended
        assert self.num_offered == ended + unclaimed, "shares were offered and are neither claimed, ended nor open"
