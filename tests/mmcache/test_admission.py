"""More requests, questions and parts of calls than a connection may have open: answered, bounded, and then cut."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import mmcache
from ipc.memory_shm import sealed_copy
from mmcache.framing import Frame, Kind, OutgoingFrame, pack_frame, parse
from mmcache.protocol import Cancel, LeasesReply, LeasesRequest, LookupReply, Put, PutReply, StatsRequest, Unsettled
from mmcache.records import ENCODE_HEAD, LOOKUP_HEAD, MAX_REQUESTS, RESULTS_HEAD
from mmcache.server.admission import MAX_REFUSED
from mmcache.server.calls import MAX_CALLS
from mmcache.server.coordinator import Coordinator
from tests.mmcache.homes import RawClient, home_without_ranks, until
from tests.mmcache.support import encode_frame

HOUR_MS = 3_600_000


def lookup(ask_id: int) -> OutgoingFrame:
    return pack_frame(Kind.LOOKUP, None, LOOKUP_HEAD.pack(ask_id) + bytes(16))


def put(ask_id: int) -> OutgoingFrame:
    fd, _ = sealed_copy("put", [bytes(4096)])
    message = Put(ask_id=ask_id, timeout_ms=1, fingerprint=bytes(16), key=bytes(16), num_tokens=1, grid=(1, 2, 2))
    return pack_frame(Kind.PUT, message, fds=[fd], owned=True)


def part(request_id: int, call_id: int, number: int) -> OutgoingFrame:
    """Of a call that has more parts."""
    key = number.to_bytes(16, "little")
    return pack_frame(Kind.ENCODE, None, ENCODE_HEAD.pack(request_id, HOUR_MS, call_id, 1, 0, 1, 0) + key)


async def full(home: Coordinator) -> RawClient:
    """A client with as many requests open as it may have."""
    client = await RawClient.open(home)
    for request_id in range(MAX_REQUESTS):
        key = request_id.to_bytes(16, "little")
        await client.send(encode_frame(key, HOUR_MS, request_id=request_id))
    for _ in range(MAX_REQUESTS):
        assert (await client.receive()).kind == Kind.RESULTS, "each is asked for its bytes"
    return client


def told(frame: Frame) -> tuple[int, str]:
    """Kind of an answer, and the error in it."""
    if frame.kind == Kind.RESULTS:
        unsettled = parse(Unsettled, frame)
        assert (RESULTS_HEAD.unpack(frame.body), unsettled.failed) == ((5000,), [0, 1])
        return frame.kind, unsettled.errors[1]
    models = {Kind.LOOKUP_REPLY: LookupReply, Kind.PUT_REPLY: PutReply, Kind.LEASES_REPLY: LeasesReply}
    return frame.kind, parse(models[Kind(frame.kind)], frame).error  # type: ignore[attr-defined]


def test_one_too_many_is_answered_and_the_others_go_on(tmp_path: Path) -> None:
    async def ask() -> None:
        home = home_without_ranks(tmp_path)
        client = await full(home)
        extra = [encode_frame(bytes(32), request_id=5000), lookup(5001), put(5002)]
        extra += [pack_frame(Kind.LEASES, LeasesRequest(ask_id=5003))]
        await client.send(*extra)
        kinds = [Kind.RESULTS, Kind.LOOKUP_REPLY, Kind.PUT_REPLY, Kind.LEASES_REPLY]
        assert [told(await client.receive()) for _ in extra] == [(kind, "TooManyRequests") for kind in kinds]
        await client.send(pack_frame(Kind.STATS, StatsRequest(ask_id=5004)))
        assert (await client.receive()).kind == Kind.STATS_REPLY, "what is answered at once is never refused"
        (connection,) = home.connections
        assert len(connection.calls) == MAX_REQUESTS
        await client.send(pack_frame(Kind.CANCEL, Cancel(request_id=0)), lookup(5005))
        assert (await client.receive()).header == b"", "there is room for one again"
        await client.close(home)
        home.ingest.close()

    asyncio.run(ask())


def test_who_floods_on_is_cut_off(tmp_path: Path) -> None:
    async def flood() -> None:
        home = home_without_ranks(tmp_path)
        client = await full(home)
        for ask_id in range(MAX_REFUSED):
            await client.send(lookup(5000 + ask_id))
            assert told(await client.receive()) == (Kind.LOOKUP_REPLY, "TooManyRequests")
        await client.send(lookup(5000 + MAX_REFUSED))
        with pytest.raises(mmcache.ConnectionLost):
            await client.receive()
        await until(lambda: not home.connections, "it is forgotten")
        home.ingest.close()

    asyncio.run(flood())


async def caught_up(client: RawClient) -> None:
    """Return when everything that was sent has been looked at."""
    await client.send(lookup(9999))
    while (await client.receive()).kind != Kind.LOOKUP_REPLY:
        pass


def test_calls_that_never_end_are_bounded(tmp_path: Path) -> None:
    """Whoever says again and again that there is more, and then cancels: its calls are forgotten, the oldest first."""

    async def open_calls() -> None:
        home = home_without_ranks(tmp_path)
        client = await RawClient.open(home)
        for call_id in range(MAX_CALLS + 100):
            await client.send(part(call_id, call_id, call_id))
            await client.send(pack_frame(Kind.CANCEL, Cancel(request_id=call_id)))
        await caught_up(client)
        (connection,) = home.connections
        calls = connection.calls
        assert len(calls) == 0
        assert len(calls._calls) <= MAX_CALLS
        assert sum(len(call.requests) for call in calls._calls.values()) == 0
        await client.close(home)
        home.ingest.close()

    asyncio.run(open_calls())


def test_parts_without_end_of_one_call_are_bounded(tmp_path: Path) -> None:
    async def go_on() -> None:
        home = home_without_ranks(tmp_path)
        client = await RawClient.open(home)
        for number in range(2000):
            await client.send(part(number, 1, number))
            await client.send(pack_frame(Kind.CANCEL, Cancel(request_id=number)))
        await caught_up(client)
        (connection,) = home.connections
        assert [len(call.requests) for call in connection.calls._calls.values()] in ([], [0])
        await client.close(home)
        home.ingest.close()

    asyncio.run(go_on())
