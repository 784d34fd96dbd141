"""Who holds what since when, and what is quarantined and why: the JSON behind `mmcache leases`.

There may be a great many leases: a turn of the loop looks at a few of them. What changes meanwhile is counted as it is
when its holder is looked at.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

from ipc.leases import Holder
from ipc.pool import Extent
from ipc.shares import HolderState, Leasable, Share, ShareState
from mmcache.errors import EncodeFailed, ItemError, TooManyRequests
from mmcache.framing import MAX_BODY_BYTES, Frame, Kind, pack_frame, parse
from mmcache.protocol import LeasesReply, LeasesRequest
from mmcache.records import GRANT_EXTENT
from mmcache.server.books import problems
from mmcache.server.keepings import Keeping, extents_held, keepings

if TYPE_CHECKING:
    from mmcache.server.connection import Connection
    from mmcache.server.coordinator import Coordinator

Row: TypeAlias = dict[str, Any]

MAX_HOLDERS = 1000
MAX_PROBLEMS = 100
SOCKET_CLOSED = "its socket is closed and it lives"
SLICE_S = 0.001
"""The loop has its turn after as much work as this, or what one holder takes."""
ENDED = frozenset({ShareState.ACKNOWLEDGED, ShareState.DIED})


def on_leases(connection: Connection, _: Holder, frame: Frame) -> None:
    """LEASES: answered when everything has been looked at."""
    request = parse(LeasesRequest, frame)

    def fail(fault: Exception) -> None:
        error = fault if isinstance(fault, ItemError) else EncodeFailed(f"internal error: {fault!r}")
        reply = LeasesReply(ask_id=request.ask_id, error=type(error).__name__, reason=error.reason)
        connection.send(pack_frame(Kind.LEASES_REPLY, reply))

    try:
        connection.admit_question()
    except TooManyRequests as error:
        fail(error)
    else:
        connection.coordinator.background.spawn(connection, _answer(connection, request), fail)


async def _answer(connection: Connection, request: LeasesRequest) -> None:
    home = connection.coordinator
    home.sweep()
    body = await LeasesView(home, request).body()
    connection.send(pack_frame(Kind.LEASES_REPLY, LeasesReply(ask_id=request.ask_id), body))


class LeasesView:
    """One look at everything: totals of all, rows of as many as are asked for and fit into a frame."""

    def __init__(self, home: Coordinator, request: LeasesRequest) -> None:
        self._home = home
        self._request = request
        self._now = time.monotonic()
        self._turn_began = time.perf_counter()
        self._room = MAX_BODY_BYTES

    async def body(self) -> bytes:
        """The answer. Holders are listed largest first, what they have oldest first."""
        owners = [(owner, owner.holder) for owner in self._home.connections if owner.holder is not None]
        rows = await self._holders(owners)
        rows.sort(key=lambda row: row["bytes_held"], reverse=True)
        totals = json.dumps(self._totals(rows)).encode()
        self._room -= len(totals) + 100  # and the names of the lists
        chosen = [(owner, holder) for owner, holder in owners if self._is_asked(holder.pid)]
        asked = [row for row in rows if self._is_asked(row["pid"])]
        limit = self._request.limit
        lists = {
            "holders": await self._packed(iter(asked[:MAX_HOLDERS])),
            "kept": await self._packed(islice(self._kept(chosen), limit)),
            "leases": await self._packed(islice(self._leases([holder for _, holder in chosen]), limit)),
        }
        parts = [b', "%s": [%s]' % (name.encode(), b", ".join(packed)) for name, packed in lists.items()]
        return b"".join((totals[:-1], *parts, b"}"))

    def _is_asked(self, pid: int) -> bool:
        return self._request.pid in (None, pid)

    async def _holders(self, owners: Sequence[tuple[Connection, Holder]]) -> list[Row]:
        rows: list[Row] = []
        for owner, holder in owners:
            if owner in self._home.connections:  # else it has left meanwhile
                rows.append(_holder(self._home, owner, holder, self._now))
            await self._rest()
        return rows

    def _totals(self, rows: Sequence[Row]) -> Row:
        settings = self._home.settings
        return {
            "num_holders": len(rows),
            "num_leases": sum(row["leases"] for row in rows),
            "num_kept": sum(row["kept"] for row in rows),
            "quarantined": {
                "holders": sum(row["why"] != "" for row in rows),
                "leases": sum(row["quarantined"] for row in rows),
                "bytes": sum(row["bytes_quarantined"] for row in rows),
                "bytes_staged": sum(row["bytes_staged_quarantined"] for row in rows),
            },
            "lease_limit_s": settings.lease_limit_s,
            "lease_limit_action": settings.lease_limit_action,
            "problems": problems(self._home)[:MAX_PROBLEMS] if self._request.check else [],
        }

    def _kept(self, owners: Iterable[tuple[Connection, Holder]]) -> Iterator[Row]:
        found = [(keeping, holder) for owner, holder in owners for keeping in keepings(self._home, owner)]
        found.sort(key=lambda pair: pair[0].since)
        return (_keeping(keeping, holder, self._now) for keeping, holder in found)

    def _leases(self, holders: Iterable[Holder]) -> Iterator[Row]:
        shares = heapq.merge(*(holder.shares() for holder in holders), key=lambda share: share.granted_at)
        return (_lease(self._home, share, self._now) for share in shares if share.state not in ENDED)

    async def _packed(self, rows: Iterator[Row]) -> list[bytes]:
        """The first rows as JSON, as many as there is room for: names are the clients' own and may be long."""
        packed: list[bytes] = []
        for row in rows:
            line = json.dumps(row).encode()
            self._room -= len(line) + 2
            if self._room < 0:
                break
            packed.append(line)
            await self._rest()
        return packed

    async def _rest(self) -> None:
        if time.perf_counter() - self._turn_began > SLICE_S:
            await asyncio.sleep(0)
            self._turn_began = time.perf_counter()


def _holder(home: Coordinator, connection: Connection, holder: Holder, now: float) -> Row:
    shares = holder.shares()
    kept = keepings(home, connection)
    quarantined = home.lease_limit.quarantined(holder)
    began = [share.granted_at for share in islice(shares, 1)] + [keeping.since for keeping in kept[:1]]
    return {
        "name": holder.name,
        "pid": holder.pid,
        "state": holder.state.name.lower(),
        "why": _why(home, holder, bool(quarantined)),
        "leases": len(shares),
        "bytes": sum(share.extent.nbytes for share in shares),
        "kept": len(kept),
        "bytes_kept": sum(extent.nbytes for extent in {keeping.extent for keeping in kept}),
        "bytes_held": sum(extent.nbytes for extent in extents_held(home, connection)),
        "oldest_seconds": _seconds(now, min(began)) if began else 0.0,
        "quarantined": len(quarantined),
        "bytes_quarantined": sum(share.extent.nbytes for share in quarantined),
        "offered_unclaimed": sum(keeping.num_to_come for keeping in kept if keeping.what == "offered"),
        "strays": holder.num_strays,
    } | home.staging.row_of(connection)


def _lease(home: Coordinator, share: Share, now: float) -> Row:
    return _embedding(share.extent) | {
        "seconds": _seconds(now, share.granted_at),
        "state": share.state.name.lower(),
        "why": _why(home, share.holder, share.state is ShareState.QUARANTINED),
        "pid": share.holder.pid,
        "holder": share.holder.name,
    }


def _keeping(keeping: Keeping, holder: Holder, now: float) -> Row:
    return _embedding(keeping.extent) | {
        "seconds": _seconds(now, keeping.since),
        "state": keeping.what,
        "consumers": keeping.num_to_come,
        "pid": holder.pid,
        "holder": holder.name,
    }


def _embedding(extent: Leasable) -> Row:
    assert isinstance(extent, Extent), "shares are granted on extents of a pool"
    assert isinstance(extent.info, bytes), "a published extent has its grant record"
    assert extent.key is not None, "a published extent has its key"
    return {
        "key": extent.key.hex(),
        "bytes": extent.nbytes,
        "tokens": GRANT_EXTENT.unpack(extent.info)[1],
        "pool": extent.pool_id,
    }


def _why(home: Coordinator, holder: Holder, is_quarantined: bool) -> str:
    if holder.state is HolderState.QUARANTINED:
        return SOCKET_CLOSED
    return f"held longer than lease_limit_s = {home.settings.lease_limit_s:g}" if is_quarantined else ""


def _seconds(now: float, since: float) -> float:
    return round(max(0.0, now - since), 3)
