"""Room in the pool for one flight after the other, in the order in which their calls arrived.

A call may have some of its grants while the rest of it waits for room, and so may others: so that two of them never
wait on each other, whoever is first gets back what later ones were granted that wait for room too. Their users have
seen none of it: a call is handed out as a whole. What was taken back is settled anew, in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias, cast

from encoder.sharding import assign
from ipc.errors import ExtentTooLarge
from ipc.pool import Extent, Pool
from mmcache.errors import PoolExhausted
from mmcache.server.calls import Call
from mmcache.server.flight import AbandonedError, Flight
from mmcache.server.holdings import UNENDED, fits_without, has_staged, hopeless
from mmcache.server.rank import Rank
from mmcache.server.requests import Request
from mmcache.server.room import Place, RoomQueue

if TYPE_CHECKING:
    from mmcache.server.coordinator import Coordinator

Spawn: TypeAlias = "Callable[[Coroutine[object, object, None], Sequence[Flight]], None]"

STAGE = "waiting for room in the pool"
ROOM_POLL_S = 0.001
"""While requests wait for room, acknowledgements are looked for this often; nothing is polled otherwise."""
MAX_PAUSE_POLLS = 16
"""What else makes room is looked for more rarely the longer it was of no use, but this often at least."""


class GaveWayError(Exception):
    """Its ingest memory is needed for an earlier call's item: give it back, and fill it again when its turn comes."""


class Placing:
    """The queue for room. `spawn` runs a task on behalf of flights.

    `filling`: flights that wait for ingest memory, or for it to be filled.
    """

    def __init__(self, coordinator: Coordinator, spawn: Spawn) -> None:
        self._home = coordinator
        self._spawn = spawn
        self._queue: RoomQueue[Flight] = RoomQueue()
        self.filling: set[Flight] = set()
        self._may_give_way: set[Flight] = set()
        self._gives_way: set[Flight] = set()

    @property
    def is_waited_for(self) -> bool:
        """Whether any flight waits for room."""
        return bool(len(self._queue))

    async def place(
        self, flight: Flight, nbytes: int, patches: int, *, may_give_way: bool = False, avoid: Rank | None = None
    ) -> tuple[Rank, Extent]:
        """Choose a rank and reserve room in its pool; whoever came first is served first.

        Waiters whose own calls leave no room for it fail meanwhile. `may_give_way`: what it has in the ingest region
        can be made again, unless it was staged. `avoid`: a rank that is chosen last.

        Raises:
            PoolExhausted: it could never fit.
            AbandonedError: nobody waits for it any more.
            GaveWayError: see there; only if it may.
        """
        self.check_size(nbytes)
        if not flight.waiters:
            raise AbandonedError
        flight.stage = STAGE
        if may_give_way and not any(position in request.staged for request, position in flight.waiters):
            self._may_give_way.add(flight)
        place = flight.place = self._queue.enter(flight, flight.order)
        try:
            rank, extent = await self._room(place, nbytes, patches, avoid)
        finally:
            self._leave(place)
            self._may_give_way.discard(flight)
            self._gives_way.discard(flight)
        flight.extent = extent
        return rank, extent

    async def turn(self, flight: Flight) -> None:
        """Wait until it would be this flight's turn, with nothing in the ingest region.

        Raises:
            AbandonedError: nobody waits for it any more.
        """
        if flight.waiters:
            flight.stage = STAGE
            flight.place = self._queue.enter(flight, flight.order)
            await self._is_head(flight.place)
        if not flight.waiters:
            raise AbandonedError

    async def _room(self, place: Place[Flight], nbytes: int, patches: int, avoid: Rank | None) -> tuple[Rank, Extent]:
        polls = pause = 0
        while place.owner.waiters:
            if place.owner in self._gives_way:
                self._home.stats.gave_way += 1
                raise GaveWayError
            if not place.is_head:
                await place.moved()
                continue
            if (placed := self._try_place(nbytes, patches, avoid)) is not None:
                return placed
            self._home.stats.room_waits += 1
            self._home.sweep()
            if polls > pause:
                polls, pause = 0, 1 if self._make_room(place, nbytes) else min(2 * pause + 1, MAX_PAUSE_POLLS)
            polls += 1
            await asyncio.sleep(ROOM_POLL_S)
        raise AbandonedError

    def _pools(self) -> list[Pool]:
        return [rank.pool for rank in self._home.ranks.ready]

    def check_size(self, nbytes: int) -> None:
        """Raise `PoolExhausted` if an embedding could never fit."""
        largest = max([pool.bytes_total for pool in self._pools()], default=nbytes)
        if nbytes > largest:
            raise PoolExhausted(f"{nbytes} bytes can never fit into a pool of {largest} bytes; raise pool_bytes")

    def _try_place(self, nbytes: int, patches: int, avoid: Rank | None) -> tuple[Rank, Extent] | None:
        ranks = self._home.ranks.ready
        if not ranks:
            return None
        cost_s = ranks[0].cost.item_seconds(patches)
        (best,) = assign([cost_s], [rank.batcher.left_s for rank in ranks])
        for rank in sorted((ranks[best], *ranks[:best], *ranks[best + 1 :]), key=lambda rank: rank is avoid):
            try:
                extent = rank.pool.reserve(nbytes)
            except ExtentTooLarge as error:
                raise PoolExhausted(f"{error}; raise pool_bytes") from error
            if extent is not None:
                return rank, extent
        return None

    def _make_room(self, place: Place[Flight], nbytes: int) -> bool:
        """Fail those for whom waiting cannot help, take one call's grants back, have one item give way.

        Returns whether something was done.
        """
        done = [self._failhopeless(place.owner, nbytes), self._recall_one(place), self._have_one_give_way()]
        return any(done) or self._end_one(place, nbytes)

    def _have_one_give_way(self) -> bool:
        """An earlier call than the last in the queue waits for ingest memory: while the head waits, none is freed."""
        orders = [flight.order for flight in self.filling if flight.waiters]
        if not orders or not self._home.ingest.is_waited_for:
            return False
        for place in reversed(self._queue):
            if place.order <= min(orders):
                return False
            if place.owner in self._may_give_way:
                self._may_give_way.discard(place.owner)
                self._gives_way.add(place.owner)
                place.wake()
                return True
        return False

    def _failhopeless(self, flight: Flight, nbytes: int) -> bool:
        pools = self._pools()
        waiters = list(flight.waiters)
        reasons = {call: hopeless(call, nbytes, pools) for call in {request.call for request, _ in waiters}}
        for request, position in waiters:
            if reason := reasons[request.call]:
                flight.leave(request, position)
                request.fail(position, PoolExhausted(reason))
        return any(reasons.values())

    def _recall_one(self, head: Place[Flight]) -> bool:
        """Take back what the latest call has that waits for room, is later than the head's, and has anything."""
        for call in self._later_calls(head.order):
            found = [(request, positions) for request in call.requests if (positions := self._recallable(request))]
            if found:
                self._recall(call, found)
                return True
        return False

    def _end_one(self, head: Place[Flight], nbytes: int) -> bool:
        """What was staged is not taken back: if only such grants are in the way, the latest call that has them ends.

        It gets errors for what it still waits for, and its user what it has.
        """
        later = list(self._later_calls(head.order))
        stuck = next((call for call in later if any(map(has_staged, call.requests))), None)
        if stuck is None or not fits_without(later, nbytes, self._pools()):
            return False
        reason = "an earlier call needs the room that this one's staged items took, and these cannot be encoded again"
        for place in self._queue:
            for request, position in list(place.owner.waiters):
                if request.call is stuck:
                    place.owner.leave(request, position)
                    request.fail(position, PoolExhausted(reason))
        return True

    def _later_calls(self, order: int) -> Iterator[Call]:
        seen = set()
        for place in reversed(self._queue):
            for request, _ in place.owner.waiters:
                if request.call.order > order and request.call not in seen:
                    seen.add(request.call)
                    yield request.call

    def _recallable(self, request: Request) -> list[int]:
        """Positions whose grants keep memory that is of use. What was staged cannot be made again: it stays."""
        if not request.connection.is_open:
            return []
        return [
            position
            for position, share in request.shares.items()
            if share.state in UNENDED
            and position not in request.staged
            and self._home.pools.pool_of(cast("Extent", share.extent)) is not None
        ]

    def _recall(self, call: Call, found: Sequence[tuple[Request, Sequence[int]]]) -> None:
        parked = Flight(b"", b"")
        parked.stage = STAGE
        place = parked.place = self._queue.enter(parked, call.order, has_precedence=True)
        for request, positions in found:
            self._home.stats.recalls += len(positions)
            request.recall(positions, parked)
        self._spawn(self._wait_parked(parked, place), [parked])

    async def _wait_parked(self, parked: Flight, place: Place[Flight]) -> None:
        """When the call's turn comes, what was taken back from it comes before what it did not have yet."""
        await self._is_head(place)
        self._home.settle_anew(parked)

    async def _is_head(self, place: Place[Flight]) -> None:
        try:
            while place.owner.waiters and not place.is_head:
                await place.moved()
        finally:
            self._leave(place)

    def _leave(self, place: Place[Flight]) -> None:
        place.owner.place = None
        self._queue.leave(place)
