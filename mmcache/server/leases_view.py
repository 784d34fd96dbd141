"""Who holds what since when, and what is quarantined and why: the JSON behind `mmcache leases`."""

from __future__ import annotations

import heapq
import json
import time
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

from ipc.leases import Holder, HolderState, Share, ShareState
from ipc.pool import Extent
from mmcache.framing import MAX_BODY_BYTES, Frame, Kind, pack_frame, parse
from mmcache.protocol import LeasesReply, LeasesRequest
from mmcache.records import GRANT_EXTENT
from mmcache.server.books import problems

if TYPE_CHECKING:
    from mmcache.server.connection import Connection
    from mmcache.server.coordinator import Coordinator

Row: TypeAlias = dict[str, Any]

MAX_HOLDERS = 1000
MAX_PROBLEMS = 100
SOCKET_CLOSED = "its socket is closed and it lives"


def on_leases(connection: Connection, _: Holder, frame: Frame) -> None:
    """Answer a LEASES."""
    request = parse(LeasesRequest, frame)
    home = connection.coordinator
    home.sweep()
    found = view(home, request.limit)
    if request.check:
        found["problems"] = problems(home)[:MAX_PROBLEMS]
    connection.send(pack_frame(Kind.LEASES_REPLY, LeasesReply(ask_id=request.ask_id), _body(found)))


def view(home: Coordinator, limit: int) -> Row:
    """Holders, largest first, and their leases, oldest first, up to `limit`; totals of all of them."""
    now = time.monotonic()
    owners = [(connection, connection.holder) for connection in home.connections if connection.holder is not None]
    holders = [holder for _, holder in owners]
    rows = [_holder(home, holder, now) | home.staging.row_of(connection) for connection, holder in owners]
    rows.sort(key=lambda row: row["bytes"], reverse=True)
    return {
        "num_holders": len(rows),
        "num_leases": sum(row["leases"] for row in rows),
        "holders": rows[:MAX_HOLDERS],
        "leases": [_lease(home, share, now) for share in islice(_oldest(holders), limit)],
        "quarantined": {
            "holders": sum(row["why"] != "" for row in rows),
            "leases": sum(row["quarantined"] for row in rows),
            "bytes": sum(row["bytes_quarantined"] for row in rows),
            "bytes_staged": sum(row["bytes_staged_quarantined"] for row in rows),
        },
        "lease_limit_s": home.settings.lease_limit_s,
        "lease_limit_action": home.settings.lease_limit_action,
        "problems": [],
    }


def _oldest(holders: list[Holder]) -> Iterator[Share]:
    return heapq.merge(*(holder.shares() for holder in holders), key=lambda share: share.granted_at)


def _holder(home: Coordinator, holder: Holder, now: float) -> Row:
    shares = holder.shares()
    quarantined = [share for share in shares if share.state is ShareState.QUARANTINED]
    first = next(iter(shares), None)
    return {
        "name": holder.name,
        "pid": holder.pid,
        "state": holder.state.name.lower(),
        "why": _why(home, holder, bool(quarantined)),
        "leases": len(shares),
        "bytes": sum(share.extent.nbytes for share in shares),
        "oldest_seconds": _seconds(now, first) if first is not None else 0.0,
        "quarantined": len(quarantined),
        "bytes_quarantined": sum(share.extent.nbytes for share in quarantined),
        "offered_unclaimed": sum(offer.num_unclaimed for offer in holder.offers.open()),
        "strays": holder.num_strays,
    }


def _lease(home: Coordinator, share: Share, now: float) -> Row:
    extent = share.extent
    assert isinstance(extent, Extent), "shares are granted on extents of a pool"
    assert isinstance(extent.info, bytes), "a published extent has its grant record"
    assert extent.key is not None, "a published extent has its key"
    return {
        "key": extent.key.hex(),
        "bytes": extent.nbytes,
        "tokens": GRANT_EXTENT.unpack(extent.info)[1],
        "pool": extent.pool_id,
        "seconds": _seconds(now, share),
        "state": share.state.name.lower(),
        "why": _why(home, share.holder, share.state is ShareState.QUARANTINED),
        "pid": share.holder.pid,
        "holder": share.holder.name,
    }


def _why(home: Coordinator, holder: Holder, is_quarantined: bool) -> str:
    if holder.state is HolderState.QUARANTINED:
        return SOCKET_CLOSED
    return f"held longer than lease_limit_s = {home.settings.lease_limit_s:g}" if is_quarantined else ""


def _seconds(now: float, share: Share) -> float:
    return round(max(0.0, now - share.granted_at), 3)


def _body(found: Row) -> bytes:
    """Names are the clients' own and may be long: leases are left out until it fits into a frame, and then holders."""
    while len(body := json.dumps(found).encode()) > MAX_BODY_BYTES:
        for rows in ("leases", "holders"):
            if len(found[rows]) > 1:
                del found[rows][len(found[rows]) // 2 :]
                break
    return body
