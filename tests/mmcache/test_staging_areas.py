"""The books of staging regions: one a client, within a bound for all, and given back as soon as nobody needs them."""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from ipc.staging import Staged
from mmcache.errors import SliceGone, StagingExhausted, UnsupportedItem
from mmcache.server.connection import Connection
from mmcache.server.staging import StagingDesk
from mmcache.server.staging_area import StagingArea
from tests.ipc.regions import descriptors

REGION = 64 * mmap.PAGESIZE
PAGE = mmap.PAGESIZE


async def until(is_true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.001)


@dataclass(eq=False)
class Peer:
    """As much of a connection as a desk looks at."""

    namespace: str = ""


@dataclass
class Books:
    """A desk, and the regions that ranks were told to unmap."""

    num_regions: int = 2
    gone: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.desk = StagingDesk(REGION, self.num_regions * REGION)
        self.desk.on_gone = self.gone.append

    async def area(self, peer: Connection) -> StagingArea:
        return await self.desk.make_area(peer)

    async def settled(self, num_regions: int) -> None:
        """Wait for what threads still free."""
        await until(lambda: self.desk.counters()["regions"] == num_regions, "the memory of the others is freed")
        self.desk.check()


def peer() -> Connection:
    return cast("Connection", Peer())


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)
    gc.collect()
    assert descriptors("mmcache-staging") == [], "no memory is left"


async def reserve(area: StagingArea, nbytes: int, own: tuple[Staged, ...] = ()) -> Staged:
    async with area.turn:
        return await area.reserve(nbytes, 1, own)


def test_who_asks_while_a_region_is_made_gets_the_same() -> None:
    async def test() -> None:
        books, client = Books(num_regions=1), peer()
        areas = await asyncio.gather(*(books.area(client) for _ in range(5)))
        assert len(set(areas)) == 1
        assert await books.area(client) is areas[0]
        assert (books.desk.counters()["regions"], books.desk.counters()["bytes_total"]) == (1, REGION)
        books.desk.end(client)
        await books.settled(0)
        assert books.gone == [areas[0].region_id]

    run(test())


@pytest.mark.parametrize("how", ["end", "quarantine"])
def test_a_region_whose_client_leaves_while_it_is_made_is_given_back(how: str) -> None:
    async def test() -> None:
        books, client = Books(num_regions=1), peer()
        asked = [asyncio.ensure_future(books.area(client)) for _ in range(2)]
        await asyncio.sleep(0)
        getattr(books.desk, how)(client)
        for result in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(result, SliceGone)
        assert books.desk.counters()["regions"] == 0
        other = peer()
        await books.area(other)
        books.desk.end(other)
        await books.settled(0)

    run(test())


def test_a_thousand_clients_have_no_more_than_all_may_have() -> None:
    async def test() -> None:
        books, clients = Books(num_regions=8), [peer() for _ in range(1024)]
        found = await asyncio.gather(*(books.area(client) for client in clients), return_exceptions=True)
        failed = [result for result in found if not isinstance(result, StagingArea)]
        assert len(failed) == 1016
        assert all(isinstance(error, StagingExhausted) for error in failed)
        assert f"{8 * REGION} bytes, the limit is {8 * REGION} for all" in str(failed[0])
        assert books.desk.counters()["bytes_total"] == 8 * REGION
        assert len(descriptors("mmcache-staging")) == 8
        for client in clients:
            books.desk.end(client)
        await books.settled(0)
        await books.area(clients[-1])
        books.desk.end(clients[-1])
        await books.settled(0)

    run(test())


def test_a_region_that_is_still_read_counts_until_it_is_not() -> None:
    async def test() -> None:
        books, client, other = Books(num_regions=1), peer(), peer()
        area = await books.area(client)
        staged = await reserve(area, 10 * PAGE)
        staged.complete()
        staged.begin_read()
        books.desk.end(client)
        assert (books.gone, books.desk.area_of(client)) == ([], None)
        assert books.desk.fd_of(area.region_id) is not None, "for the rank that is about to read it"
        with pytest.raises(StagingExhausted, match="staging_bytes_total"):
            await books.area(other)
        staged.end_read()
        area.freed()
        await books.settled(0)
        await books.area(other)
        books.desk.end(other)
        await books.settled(0)
        assert books.gone == [1, 2]

    run(test())


def test_only_what_was_being_written_is_kept_when_a_socket_closes() -> None:
    async def test() -> None:
        books, client = Books(num_regions=1), peer()
        area = await books.area(client)
        done, torn = await reserve(area, 20 * PAGE), await reserve(area, 2 * PAGE)
        tokens = [books.desk.add(area, staged, b"k", "array", b"") for staged in (done, torn)]
        done.complete()
        assert books.desk.quarantine(client)
        with pytest.raises(SliceGone):
            books.desk.claim(tokens[0], b"k", "")
        await until(lambda: area.bytes_charged <= 2 * PAGE, "the rest is given back")
        assert area.fd is not None
        assert os.fstat(area.fd).st_blocks * 512 == 2 * PAGE, "the machine has the rest"
        row = books.desk.row_of(client)
        assert (row["staged"], row["bytes_staged_quarantined"], row["bytes_region"]) == (1, 2 * PAGE, 2 * PAGE)
        with pytest.raises(StagingExhausted):
            await books.area(peer())
        books.desk.end(client)
        await books.settled(0)
        assert books.desk.counters()["died"] == 2

    run(test())


def test_a_quarantined_region_goes_when_its_last_read_is_done() -> None:
    async def test() -> None:
        books, client = Books(), peer()
        area = await books.area(client)
        staged = await reserve(area, PAGE)
        staged.complete()
        staged.begin_read()
        assert books.desk.quarantine(client), "it is being read"
        staged.end_read()
        area.freed()
        await books.settled(0)
        assert books.desk.area_of(client) is None
        books.desk.end(client)  # its process dies later

    run(test())


def test_waiting_that_cannot_help_fails_at_once() -> None:
    async def test() -> None:
        books, client = Books(), peer()
        area = await books.area(client)
        own = (await reserve(area, 40 * PAGE),)
        with pytest.raises(StagingExhausted, match=f"{40 * PAGE} bytes, leave no room for {30 * PAGE} in a region"):
            await reserve(area, 30 * PAGE, own)
        with pytest.raises(StagingExhausted, match="never fit"):
            await reserve(area, REGION + 1)
        waiting = asyncio.ensure_future(reserve(area, 30 * PAGE))
        await asyncio.sleep(0)
        own[0].cancel()
        area.freed()
        assert (await waiting).nbytes == 30 * PAGE
        books.desk.end(client)
        await books.settled(0)

    run(test())


def test_who_waits_for_room_is_told_that_its_client_left() -> None:
    async def test() -> None:
        books, client = Books(), peer()
        area = await books.area(client)
        await reserve(area, REGION)
        waiting = [asyncio.ensure_future(reserve(area, PAGE)) for _ in range(2)]
        await asyncio.sleep(0)
        books.desk.quarantine(client)
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(result, SliceGone)
        books.desk.end(client)
        await books.settled(0)

    run(test())


@pytest.mark.parametrize("says", ["staged", "withdrawn"])
def test_a_fault_while_its_client_writes_costs_no_room_for_good(says: str) -> None:
    """Its room is another's only when its client has said that it writes no more."""

    async def test() -> None:
        books, client = Books(), peer()
        area = await books.area(client)
        staged = await reserve(area, PAGE)
        token = books.desk.add(area, staged, b"k" * 16, "array", b"")
        claimed = books.desk.claim(token, b"k" * 16, "")
        claimed.num_active += 1
        claimed.ended(UnsupportedItem("not this one"))
        with pytest.raises(SliceGone):
            books.desk.claim(token, b"k" * 16, "")
        assert area.staging.bytes_used == PAGE, "its client writes on"
        own = books.desk.own(client, token)
        assert own is claimed
        if says == "staged":
            own.written()
        else:
            own.end("withdrawn")
        assert area.staging.bytes_used == 0
        assert books.desk.own(client, token) is None
        books.desk.check()
        area.leave(area.staging.end_all)
        await books.settled(0)

    run(test())
