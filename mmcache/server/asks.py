"""Everything that a greeted client may send besides ENCODE and SUPPLY: a handler for each kind of frame."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from ipc.leases import Holder
from mmcache.errors import ProtocolError
from mmcache.framing import Frame, Kind, close_all, pack_frame, parse
from mmcache.protocol import Acknowledge, Bye, Cancel, Reload, StatsReply, StatsRequest
from mmcache.server.calls import acknowledgements
from mmcache.server.evictions import on_evict
from mmcache.server.fetches import on_fetch
from mmcache.server.leases_view import on_leases
from mmcache.server.lookups import on_lookup
from mmcache.server.offers import on_open, on_withdraw
from mmcache.server.puts import on_put
from mmcache.server.stage_frames import on_stage, on_staged

if TYPE_CHECKING:
    from mmcache.server.connection import Connection

MAX_HEADER_BYTES = 64 << 10

Handler: TypeAlias = "Callable[[Connection, Holder, Frame], None]"


def answer(connection: Connection, holder: Holder, frame: Frame) -> None:
    """Handle a frame; its descriptors are the handler's.

    Raises:
        ProtocolError: it does not belong here.
    """
    handle = HANDLERS.get(frame.kind)
    if handle is None or len(frame.header) > MAX_HEADER_BYTES:
        close_all(frame.fds)
        raise ProtocolError(
            f"frame of kind {frame.kind} with a header of {len(frame.header)} bytes does not belong here"
        )
    if frame.fds and frame.kind not in CARRIERS:
        close_all(frame.fds)
        raise ProtocolError(f"frame of kind {frame.kind} carries descriptors")
    handle(connection, holder, frame)


def _cancel(connection: Connection, holder: Holder, frame: Frame) -> None:
    connection.calls.on_cancel(holder, parse(Cancel, frame))


def _acknowledge(_: Connection, holder: Holder, frame: Frame) -> None:
    parse(Acknowledge, frame)
    for slot, generation in acknowledgements(frame, holder):
        holder.acknowledge(slot, generation)


def _bye(connection: Connection, holder: Holder, frame: Frame) -> None:
    parse(Bye, frame)
    held = acknowledgements(frame, holder)
    connection.calls.cancel()
    connection.coordinator.offers.left(holder)
    connection.coordinator.staging.end(connection)  # it has written what it ever will
    for share in holder.shares():
        if (share.slot, share.generation) not in held:
            holder.acknowledge(share.slot, share.generation)


def _stats(connection: Connection, _: Holder, frame: Frame) -> None:
    ask_id = parse(StatsRequest, frame).ask_id
    counters = json.dumps(connection.coordinator.snapshot()).encode()
    connection.send(pack_frame(Kind.STATS_REPLY, StatsReply(ask_id=ask_id), counters))


def _reload(connection: Connection, _: Holder, frame: Frame) -> None:
    reloads = connection.coordinator.reloads
    reloads.start(parse(Reload, frame), lambda reloaded: connection.send(pack_frame(Kind.RELOADED, reloaded)))


HANDLERS: dict[int, Handler] = {
    Kind.CANCEL: _cancel,
    Kind.ACKNOWLEDGE: _acknowledge,
    Kind.BYE: _bye,
    Kind.STATS: _stats,
    Kind.RELOAD: _reload,
    Kind.LOOKUP: on_lookup,
    Kind.LEASES: on_leases,
    Kind.PUT: on_put,
    Kind.FETCH: on_fetch,
    Kind.OPEN: on_open,
    Kind.STAGE: on_stage,
    Kind.STAGED: on_staged,
    Kind.WITHDRAW: on_withdraw,
    Kind.EVICT: on_evict,
}
CARRIERS: frozenset[int] = frozenset({Kind.PUT})
"""Kinds that come with descriptors."""
