"""What calls hold of the pools, and what room there would be without it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from ipc.allocator import ALIGNMENT
from ipc.pool import Extent, ExtentState, Pool
from ipc.shares import ShareState

if TYPE_CHECKING:
    from mmcache.server.calls import Call
    from mmcache.server.requests import Request

UNENDED = frozenset({ShareState.HELD, ShareState.QUARANTINED})


def fits_without(calls: Sequence[Call], nbytes: int, pools: Sequence[Pool]) -> bool:
    """Whether there would be room if these calls had nothing, and all others kept what they have."""
    held = Counter(
        share.extent
        for call in calls
        for request in call.requests
        for share in request.shares.values()
        if share.state in UNENDED
    )
    for pool in pools:
        busy = (extent for extent in pool.extents() if extent.is_busy or extent.state is ExtentState.WRITING)
        kept = {extent for extent in busy if held[extent] < extent.num_shares + extent.num_pins or not held[extent]}
        if largest_gap(pool, kept) >= nbytes:
            return True
    return False


def hopeless(call: Call, nbytes: int, pools: Sequence[Pool]) -> str:
    """Why there will be no room while the call lasts, whatever else becomes free; empty if there may be."""
    own = own_extents(call)
    if not pools or any(largest_gap(pool, own) >= nbytes for pool in pools):
        return ""
    held, total = sum(extent.nbytes for extent in own), sum(pool.bytes_total for pool in pools)
    reason = (
        f"this call itself holds {held} of {total} bytes of the pool, and nowhere between them is room for {nbytes}"
    )
    return f"{reason}; ask for fewer items at once, or raise pool_bytes"


def has_staged(request: Request) -> bool:
    """Whether it was granted anything whose pixels were staged."""
    return any(position in request.staged and share.state in UNENDED for position, share in request.shares.items())


def own_extents(call: Call) -> set[Extent]:
    """What a call has leases on, and what is written for it."""
    own: set[Extent] = set()
    for request in call.requests:
        own.update(cast("Extent", share.extent) for share in request.shares.values() if share.state in UNENDED)
        writing = (flight.extent for flight in request.open.values())
        own.update(extent for extent in writing if extent is not None and extent.state is ExtentState.WRITING)
    return own


def largest_gap(pool: Pool, kept: set[Extent]) -> int:
    """The most bytes in a row that can become free in a pool as long as these extents stay."""
    largest = end = 0
    for offset, nbytes in sorted((extent.offset, extent.nbytes) for extent in kept if extent.pool is pool):
        largest = max(largest, offset - end)
        end = offset + -(-nbytes // ALIGNMENT) * ALIGNMENT
    return max(largest, pool.bytes_total - end)
