"""What is to be found no more: out of the pools at once, out of the stores as soon as they can."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from typing import TYPE_CHECKING

from ipc.leases import Holder
from mmcache.errors import EncodeFailed, ItemError, ProtocolError, TooManyRequests
from mmcache.framing import Frame, Kind, pack_frame, parse
from mmcache.keys import DIGEST_BYTES, ContentKey, Fingerprint, namespace_id, store_key
from mmcache.protocol_upkeep import Evict, EvictReply
from mmcache.records import parse_keys
from mmcache.tiers.base import Entry, Purged, Selection

if TYPE_CHECKING:
    from ipc.pool import Extent
    from mmcache.server.connection import Connection
    from mmcache.server.coordinator import Coordinator

log = logging.getLogger(__name__)

WITHDRAWALS_A_TURN = 256
MAX_REMEMBERED = 64
"""Evictions that are over; what was looked up before the first of them counts as evicted."""


class Evictions:
    """All evictions that clients ask for.

    What a store found before an eviction ended may be on its way to a pool: `has` tells, before it is published.

    Attributes:
        num_ended: how many are over.
    """

    def __init__(self, home: Coordinator) -> None:
        self._home = home
        self._active: list[Selection] = []
        self._ended: deque[Selection] = deque(maxlen=MAX_REMEMBERED)
        self.num_ended = 0

    def has(self, entry: Entry, looked_up_at: int) -> bool:
        """Whether an entry is evicted that was looked up when so many evictions had ended."""
        num_since = self.num_ended - looked_up_at
        if num_since > len(self._ended):
            return True
        since = list(self._ended)[len(self._ended) - num_since :] if num_since else []
        return any(selection.has(entry) for selection in (*self._active, *since))

    async def evict(self, selection: Selection, is_dry_run: bool) -> tuple[dict[str, Purged], dict[str, str]]:
        """Remove what is meant from every tier. What each had, and why some may still be in a tier."""
        if is_dry_run:
            return await self._everywhere(selection, is_dry_run)
        self._active.append(selection)
        try:
            return await self._everywhere(selection, is_dry_run)
        finally:
            self._active.remove(selection)
            self._ended.append(selection)
            self.num_ended += 1

    async def _everywhere(self, selection: Selection, is_dry_run: bool) -> tuple[dict[str, Purged], dict[str, str]]:
        purged, failed = {"pool": await self._withdraw(selection, is_dry_run)}, {}
        for name, outcome in (await self._home.store.purge(selection, is_dry_run=is_dry_run)).items():
            if isinstance(outcome, Purged):
                purged[name] = outcome
            else:
                failed[name] = str(outcome)
        return purged, failed

    async def _withdraw(self, selection: Selection, is_dry_run: bool) -> Purged:
        pools = self._home.pools

        def made_under(key: bytes) -> Fingerprint:
            return pools.made_under(key, self._home.fingerprint)

        def is_meant(key: bytes, extent: Extent) -> bool:
            return selection.matches(store_key(made_under(key), ContentKey(key)), extent.group)

        if selection.keys is None:
            cached = list(pools.index.items())
        else:
            names = [(key[:DIGEST_BYTES], key[DIGEST_BYTES:]) for key in selection.keys]
            found = [(name, pools.get(name)) for model, name in names if model == made_under(name)]
            cached = [(name, extent) for name, extent in found if extent is not None]
        num_entries = nbytes = 0
        for start in range(0, len(cached), WITHDRAWALS_A_TURN):
            meant = [
                extent
                for key, extent in cached[start : start + WITHDRAWALS_A_TURN]
                if pools.get(key) is extent
                and selection.matches(store_key(made_under(key), ContentKey(key)), extent.group)
            ]
            num_entries += len(meant)
            nbytes += sum(extent.nbytes for extent in meant)
            if not is_dry_run:
                pools.withdraw(*meant)
            await asyncio.sleep(0)
        return Purged(num_entries, nbytes)


def on_evict(connection: Connection, holder: Holder, frame: Frame) -> None:
    """EVICT: answered when every tier has done it.

    Raises:
        ProtocolError: it says nothing of what it means, or what it says excludes each other.
    """
    message = parse(Evict, frame)
    selection = _selection(connection, message, parse_keys(frame))

    def fail(fault: Exception) -> None:
        error = fault if isinstance(fault, ItemError) else EncodeFailed(f"internal error: {fault!r}")
        reply = EvictReply(ask_id=message.ask_id, error=type(error).__name__, reason=error.reason)
        connection.send(pack_frame(Kind.EVICT_REPLY, reply))

    try:
        connection.admit_question()
    except TooManyRequests as error:
        fail(error)
    else:
        connection.coordinator.background.spawn(connection, _answer(connection, holder.pid, message, selection), fail)


async def _answer(connection: Connection, pid: int, message: Evict, selection: Selection) -> None:
    purged, failed = await connection.coordinator.evictions.evict(selection, message.dry_run)
    if not message.dry_run:
        counts = ", ".join(f"{name} {found.num_entries}" for name, found in purged.items())
        log.info("evicted for pid %d: %s", pid, counts)
        for name, reason in failed.items():
            log.error("eviction: some may still be in the %s tier: %s", name, reason)
    tiers = {name: {"entries": found.num_entries, "bytes": found.nbytes} for name, found in purged.items()}
    body = json.dumps({"dry_run": message.dry_run, "tiers": tiers, "failed": failed}).encode()
    connection.send(pack_frame(Kind.EVICT_REPLY, EvictReply(ask_id=message.ask_id), body))


def _selection(connection: Connection, message: Evict, keys: list[bytes]) -> Selection:
    """What a client means. The one place that knows which client asks, and so may say what it must not name.

    Raises:
        ProtocolError: it says nothing, or what it says excludes each other.
    """
    others = (message.namespace is not None, message.fingerprint is not None, message.stale)
    is_whole = bool(keys) or any(others)
    if message.everything is is_whole or (keys and (others[0] or message.stale)) or all(others[1:]):
        raise ProtocolError("EVICT says nothing of what it means, or what it says excludes each other")
    served, foreign = connection.coordinator.fingerprint, connection.foreign
    if keys:
        made_under = Fingerprint(message.fingerprint or served)
        if foreign is not None:
            made_under, keys = foreign.fingerprint, list(map(foreign.key, keys))
        names = frozenset(store_key(made_under, ContentKey(key)) for key in keys)
        return Selection(namespace=connection.namespace_id, keys=names)
    return Selection(
        namespace=None if message.namespace is None else namespace_id(message.namespace),
        fingerprint=message.fingerprint,
        other_than=bytes(served) if message.stale else None,
    )
