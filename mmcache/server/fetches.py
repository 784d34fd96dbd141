"""Embeddings that are copied to a client which cannot map the memory that they are in: the slow way, counted."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, cast

from ipc.errors import IpcError
from ipc.leases import Holder
from ipc.memory_shm import sealed_copy
from mmcache.errors import EncodeFailed, ItemError, LeaseReleased, MMCacheError, TooManyRequests
from mmcache.framing import Frame, Kind, pack_frame, parse
from mmcache.protocol import Fetch, Fetched
from mmcache.server.batcher import RankLostError
from mmcache.server.ingest import IngestSlice

if TYPE_CHECKING:
    from ipc.pool import Extent
    from mmcache.server.connection import Connection
    from mmcache.server.coordinator import Coordinator

PAUSE_S = 0.05


def on_fetch(connection: Connection, holder: Holder, frame: Frame) -> None:
    """Copy what a lease is on into a memfd, which is the client's.

    Raises:
        ProtocolError: far too many questions are open.
    """
    asked = parse(Fetch, frame)
    home = connection.coordinator
    share = holder.find(asked.slot, asked.generation)

    def reply(error: MMCacheError | None = None, fd: int | None = None) -> None:
        name, reason = (type(error).__name__, str(error)[:2000]) if error is not None else ("", "")
        fetched = Fetched(ask_id=asked.ask_id, error=name, reason=reason)
        connection.send(pack_frame(Kind.FETCHED, fetched, fds=[] if fd is None else [fd], owned=True))

    try:
        connection.admit_question()
    except TooManyRequests as error:
        reply(error)
        return
    if share is None:
        reply(LeaseReleased("the lease has ended"))
        return
    extent = cast("Extent", share.extent)

    async def answer() -> None:
        deadline = asyncio.get_running_loop().time() + asked.timeout_ms / 1000
        try:
            fd = await _copied(home, extent, deadline)
        except TimeoutError:
            reply(EncodeFailed("it was not copied in time: the ingest region is full, or its rank dead"))
        except (ItemError, IpcError) as error:
            reply(EncodeFailed(str(error)))
        else:
            if holder.find(asked.slot, asked.generation) is share:  # else others may have written there
                home.stats.fetched += 1
                reply(fd=fd)
            else:
                os.close(fd)
                reply(LeaseReleased("the lease ended while it was copied"))

    home.background.spawn(connection, answer(), lambda fault: reply(EncodeFailed(f"internal error: {fault!r}")))


async def _copied(home: Coordinator, extent: Extent, deadline: float) -> int:
    """A sealed memfd with the extent's bytes, which are what they were if it is leased until the end.

    Raises:
        TimeoutError: the deadline passed.
    """
    memory = home.pools.memories[extent.pool_id]
    payload = memory.payload(extent)
    if payload is not None:
        return (await asyncio.to_thread(sealed_copy, "mmcache-fetch", [payload]))[0]
    async with asyncio.timeout_at(deadline):
        part = await home.ingest.reserve(extent.nbytes)
    try:
        while not await _copied_out(home, extent, part):
            if asyncio.get_running_loop().time() > deadline:
                raise TimeoutError
            await asyncio.sleep(PAUSE_S)  # its rank's successor is on its way
        return (await asyncio.to_thread(sealed_copy, "mmcache-fetch", [home.ingest.memory(part)]))[0]
    finally:
        home.ingest.free(part)


async def _copied_out(home: Coordinator, extent: Extent, part: IngestSlice) -> bool:
    """False if its rank is dead. Not to be cancelled: the rank would write to what is somebody else's by then."""
    rank = home.pools.rank_of(extent)
    if rank is None:
        return False
    try:
        return await rank.copy_out(extent, part.offset)
    except RankLostError:
        return False
