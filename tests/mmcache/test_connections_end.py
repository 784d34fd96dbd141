"""A connection that is over leaves nothing in the coordinator, and does not wait for cycles to be looked for."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from ipc.control import ControlMemory
from ipc.leases import Holder
from ipc.pool import Pool
from mmcache.framing import Kind, pack_frame
from mmcache.protocol import LeasesRequest, StatsRequest
from mmcache.records import ENCODE_HEAD, LOOKUP_HEAD
from tests.mmcache.homes import RawClient, home_without_ranks, until
from tests.mmcache.support import encode_frame


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_connection_dies_with_its_socket(no_collection: None, tmp_path: Path) -> None:
    async def come_and_go() -> None:
        home = home_without_ranks(tmp_path)
        for num_asked in range(3):
            client = await RawClient.open(home)
            (connection,) = home.connections
            refs = [weakref.ref(connection), weakref.ref(connection.calls), weakref.ref(connection._channel)]
            del connection
            if num_asked > 0:
                await client.send(
                    encode_frame(bytes(32)), pack_frame(Kind.LOOKUP, None, LOOKUP_HEAD.pack(2) + bytes(16))
                )
                assert {(await client.receive()).kind for _ in range(2)} == {Kind.RESULTS, Kind.LOOKUP_REPLY}
            if num_asked > 1:
                unended = ENCODE_HEAD.pack(3, 60_000, 3, 1, 0, 1, 0) + bytes([1]) * 16
                await client.send(pack_frame(Kind.ENCODE, None, unended))
                await client.send(pack_frame(Kind.LEASES, LeasesRequest(ask_id=4)))
                await client.send(pack_frame(Kind.STATS, StatsRequest(ask_id=5)))
                kinds = {(await client.receive()).kind for _ in range(3)}
                assert kinds == {Kind.RESULTS, Kind.LEASES_REPLY, Kind.STATS_REPLY}
            await client.close(home)
            await asyncio.sleep(0.01)
            assert [ref() for ref in refs] == [None] * 3, f"after {num_asked} kinds of questions"
        home.ingest.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(come_and_go())


def test_a_silent_connection_dies_too(no_collection: None, tmp_path: Path) -> None:
    """One that was closed before its handshake."""

    async def come_and_go() -> None:
        home = home_without_ranks(tmp_path)
        ours, theirs = socket.socketpair()
        home.accept(theirs)
        (connection,) = home.connections
        ref = weakref.ref(connection)
        del connection
        ours.close()
        await until(lambda: not home.connections, "it is forgotten")
        await asyncio.sleep(0.01)
        assert ref() is None
        home.ingest.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(come_and_go())


def test_a_holder_is_as_large_as_what_it_holds() -> None:
    """Its memory of the words grows with the slots, and forgets none of them."""
    pool = Pool(1, 1 << 20, on_evict=lambda _: None)
    extent = pool.reserve(1000)
    assert extent is not None
    pool.publish(extent, bytes(16), 1.0, b"")
    holder = Holder(ControlMemory.create(16384), "engine", 7)
    assert holder._seen.nbytes <= 256
    shares = [holder.grant(extent) for _ in range(1000)]
    for share in shares[::2]:
        holder.control.acknowledge(share.slot, share.generation)
    assert holder.sweep() == shares[::2]
    assert holder.sweep() == []
    again = [holder.grant(extent) for _ in range(1500)]
    for share in (*shares[1::2], *again):
        holder.control.acknowledge(share.slot, share.generation)
    assert len(holder.sweep()) == 2000
    holder.check()
    assert (holder.num_active, holder.num_strays, pool.bytes_leased) == (0, 0, 0)
    holder.control.close()
