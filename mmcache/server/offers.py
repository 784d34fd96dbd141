"""Shares for others: what a reference's token stands for, and who may claim it."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ipc.errors import ControlExhausted
from ipc.leases import Holder
from ipc.offers import Offer, OfferState
from ipc.pool import Extent
from ipc.shares import Share
from mmcache.errors import SliceGone, TooManyLeases
from mmcache.framing import Frame, parse
from mmcache.protocol import Withdraw
from mmcache.records import OPEN_HEAD, ORIGINS, EncodeFrame, parse_tokens
from mmcache.server.calls import Call
from mmcache.server.requests import Request

if TYPE_CHECKING:
    from mmcache.server.connection import Connection

POOL = ORIGINS.index("pool")
GONE = (
    "the reference is over: all its shares are claimed, it was cancelled or is older than lease_limit_s, "
    "its embedding went with its rank or its model, or the process that made it is gone"
)


@dataclass(frozen=True, slots=True)
class _Entry:
    offer: Offer
    extent: Extent
    namespace: str


class OpenOffers:
    """Every offer that is not over, by its token."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._tokens: dict[Holder, set[int]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, holder: Holder, extent: Extent, num_shares: int, namespace: str) -> int:
        """Offer shares on an extent that `holder` has just been granted. Returns the token."""
        token = secrets.randbits(64) or 1
        self._entries[token] = _Entry(holder.offer(extent, num_shares), extent, namespace)
        self._tokens.setdefault(holder, set()).add(token)
        return token

    def claim(self, token: int, consumer: Holder, namespace: str) -> tuple[Share, Extent]:
        """A share for a consumer.

        Raises:
            SliceGone: there is none to be had.
            TooManyLeases: the consumer holds as many as it may.
        """
        entry = self._entries.get(token)
        if entry is None or entry.namespace != namespace:
            raise SliceGone(GONE)
        try:
            share = entry.offer.claim(consumer)
        except ControlExhausted as error:
            if not consumer.sweep():
                raise TooManyLeases(f"{error} (control_words); release some") from error
            share = entry.offer.claim(consumer)
        if entry.offer.state is not OfferState.OPEN:
            self._forget(entry.offer.holder, token)
        return share, entry.extent

    def withdraw(self, token: int, holder: Holder) -> None:
        """The requester ends what is unclaimed. Another's token, or one that is over, changes nothing."""
        if token in self._tokens.get(holder, ()):
            self._entries[token].offer.cancel()
            self._forget(holder, token)

    def left(self, holder: Holder) -> None:
        """The requester has left: what is unclaimed ends."""
        for token in self._tokens.pop(holder, ()):
            self._entries.pop(token).offer.cancel()

    def lost(self, extents: Collection[Extent]) -> None:
        """These embeddings are not handed out any more: what is unclaimed of them ends."""
        for token, entry in list(self._entries.items()):
            if entry.extent in extents:
                self.withdraw(token, entry.offer.holder)

    def expire(self, holder: Holder, offered_before: float) -> int:
        """What a requester offered before that time, on its clock, and is unclaimed, ends. Returns how many offers."""
        tokens = self._tokens.get(holder, ())
        late = [token for token in tokens if self._entries[token].offer.offered_at < offered_before]
        for token in late:
            self.withdraw(token, holder)
        return len(late)

    def _forget(self, holder: Holder, token: int) -> None:
        del self._entries[token]
        tokens = self._tokens[holder]
        tokens.discard(token)
        if not tokens:
            del self._tokens[holder]


def on_open(connection: Connection, holder: Holder, frame: Frame) -> None:
    """OPEN: claim a share of each token; settled at once."""
    tokens = parse_tokens(frame, OPEN_HEAD.size)
    (request_id,) = OPEN_HEAD.unpack_from(frame.body)
    asked = EncodeFrame(request_id, 0, 0, 0, has_more=False, keys=b"", staged={})
    call = Call(0)
    request = Request(connection, holder, call, asked)
    call.begin(request, has_more=False)
    for position, token in enumerate(tokens):
        try:
            share, extent = connection.coordinator.offers.claim(token, holder, connection.namespace)
        except (SliceGone, TooManyLeases) as error:
            request.fail(position, error)
        else:
            request.send_grant(position, share, extent, POOL)
    request.flush()


def on_withdraw(connection: Connection, holder: Holder, frame: Frame) -> None:
    """WITHDRAW: end what this connection has offered or staged under each token."""
    parse(Withdraw, frame)
    for token in parse_tokens(frame):
        connection.coordinator.offers.withdraw(token, holder)
        if (staged := connection.coordinator.staging.own(connection, token)) is not None:
            staged.end("the staged pixels were cancelled")
