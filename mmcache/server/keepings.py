"""What a client keeps of the pools without a lease: shares that it offers, and embeddings of pixels that it staged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, cast

from ipc.pool import Extent

if TYPE_CHECKING:
    from mmcache.server.connection import Connection
    from mmcache.server.coordinator import Coordinator


class Keeping(NamedTuple):
    """An embedding that stays for consumers that have not come yet.

    Attributes:
        since: when it began, on the monotonic clock, in seconds.
        what: it keeps an unclaimed share, or the embedding of staged pixels.
        num_to_come: consumers that may come yet.
    """

    extent: Extent
    since: float
    what: Literal["offered", "staged"]
    num_to_come: int


def keepings(home: Coordinator, connection: Connection) -> list[Keeping]:
    """What a client keeps for others, oldest first."""
    found: list[Keeping] = []
    if connection.holder is not None:
        for offer in connection.holder.offers.open():
            extent = cast("Extent", offer.extent)
            found.append(Keeping(extent, offer.offered_at, "offered", offer.num_unclaimed))
    for staged in home.staging.kept_of(connection):
        assert staged.kept is not None, "it was chosen for that"
        found.append(Keeping(staged.kept.extent, staged.kept.since, "staged", staged.num_to_come))
    return sorted(found, key=lambda keeping: keeping.since)


def extents_held(home: Coordinator, connection: Connection) -> set[Extent]:
    """Every extent that stays for a client, by its leases or for others."""
    held = {keeping.extent for keeping in keepings(home, connection)}
    if connection.holder is not None:
        held.update(cast("Extent", share.extent) for share in connection.holder.shares())
    return held
