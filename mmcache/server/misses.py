"""The way of a miss: look in the store, else ask for the bytes, decode, place, encode, publish, write behind."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING

from mmcache.errors import ContentMismatch, EncodeFailed, ItemError, NotCached, SliceGone
from mmcache.keys import ContentKey, Fingerprint, store_key
from mmcache.records import ORIGINS
from mmcache.server.batcher import RankLostError
from mmcache.server.behind import WriteBehind
from mmcache.server.decode_job import Job
from mmcache.server.decoders import Pixels, Supplied
from mmcache.server.encoding import Encoding
from mmcache.server.facts import is_usable
from mmcache.server.fill_wait import Announcement
from mmcache.server.flight import AbandonedError, Flight, Waiter
from mmcache.server.flows import flow_of
from mmcache.server.patience import Patience
from mmcache.server.placing import GaveWayError, Placing
from mmcache.server.sources import blame, decoded_sizes, is_written
from mmcache.server.staged import StagedPixels
from mmcache.tiers.base import Entry

if TYPE_CHECKING:
    from mmcache.server.coordinator import Coordinator

log = logging.getLogger(__name__)

STORE = ORIGINS.index("store")


class MissPath:
    """Carries flights through the coordinator's parts. Each flight is a task; none outlives its waiters' interest."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._home = coordinator
        self._loop = asyncio.get_running_loop()
        self.placing = Placing(coordinator, self._spawn)
        self.behind = WriteBehind(coordinator, partial(self._spawn, flights=()))
        self._encoding = Encoding(coordinator, self.placing, self.behind)
        self._tasks: dict[asyncio.Task[None], Sequence[Flight]] = {}
        self._patience = Patience()

    @property
    def waits_for_room(self) -> bool:
        """Whether any flight does."""
        return self.placing.is_waited_for

    def start(self, flights: Sequence[Flight]) -> None:
        """Carry new flights; the store is asked for all of them at once."""
        self._spawn(self._serve_misses(flights), flights)

    def cancel(self) -> None:
        """Drop everything: the sidecar stops."""
        for task in list(self._tasks):
            task.cancel()

    async def _serve_misses(self, flights: Sequence[Flight]) -> None:
        fingerprint = self._home.fingerprint
        entries = await self._find(flights, fingerprint)
        for flight, entry in zip(flights, entries, strict=True):
            self._spawn(self._fly(flight, entry, fingerprint), [flight])

    async def _find(self, flights: Sequence[Flight], fingerprint: Fingerprint) -> list[Entry | None]:
        if not self._home.store.has_tiers:  # it counts them
            return await self._home.store.find([flight.key for flight in flights])
        models = [flight.foreign.fingerprint if flight.foreign is not None else fingerprint for flight in flights]
        keys = [store_key(model, ContentKey(flight.key)) for model, flight in zip(models, flights, strict=True)]
        for flight in flights:
            flight.looked_up_at = self._home.evictions.num_ended
        entries = await self._home.store.find(keys)
        is_wrong = self._home.verifier.is_condemned
        return [None if is_wrong(key) else entry for key, entry in zip(keys, entries, strict=True)]

    async def _fly(self, flight: Flight, entry: Entry | None, fingerprint: Fingerprint) -> None:
        try:
            while not await self._attempt(flight, entry, fingerprint):
                fingerprint = self._home.fingerprint
                (entry,) = await self._find([flight], fingerprint)
        except ItemError as error:
            flight.fail(error)
        finally:
            self._home.flights.end(flight)

    async def _attempt(self, flight: Flight, entry: Entry | None, fingerprint: Fingerprint) -> bool:
        """Whether it is over: it is carried, or nobody waits for it. Else it has to begin anew."""
        try:
            if await self._carry(flight, entry, fingerprint):
                return True
            await self.placing.turn(flight)
        except AbandonedError:  # who has come since waits for it even so
            return not flight.waiters
        return False

    async def _carry(self, flight: Flight, entry: Entry | None, fingerprint: Fingerprint) -> bool:
        """From the store or the client to the pool. False if it gave way to an earlier call's."""
        try:
            while entry is None or not await self._promote(flight, entry, fingerprint):
                if flight.foreign is not None:
                    raise NotCached("no tier has it, and the model that it is of is not the sidecar's")
                if fingerprint == self._home.fingerprint:
                    await self._encode(flight)
                    break
                fingerprint = self._home.fingerprint  # the model changed meanwhile: the store is asked for the new one
                (entry,) = await self._find([flight], fingerprint)
        except GaveWayError:
            return False
        return True

    async def _promote(self, flight: Flight, entry: Entry, fingerprint: Fingerprint) -> bool:
        """Store to pool. False when the store's copy is of no use after all, or not to the model served by then."""
        tokens = entry.shape[0]
        facts, ingest = self._home.facts, self._home.ingest
        if not is_usable(entry, flight.foreign or facts) or entry.nbytes > ingest.region.nbytes:
            return False
        flight.stage = "read from the store"
        self.placing.filling.add(flight)
        try:
            with flight.interrupted():
                part = await ingest.reserve(entry.nbytes)
        finally:
            self.placing.filling.discard(flight)
        try:
            if not await self._home.store.read(entry, ingest.memory(part)):
                return False
            rank, extent = await self.placing.place(flight, entry.nbytes, 0, may_give_way=True)
            await rank.copy(part.offset, extent)
        except RankLostError:
            return False
        finally:
            ingest.free(part)
        # The rank died right after its answer, the model changed, or what was found is evicted.
        is_over = extent.is_lost or (flight.foreign is None and fingerprint != self._home.fingerprint)
        if is_over or self._home.evictions.has(entry, flight.looked_up_at):
            rank.pool.abandon(extent)
            return False
        self._home.stats.hit_store += 1
        self._home.publish(flight, rank, extent, entry.encode_seconds, (tokens, *entry.grid_thw), STORE)
        return True

    async def _encode(self, flight: Flight) -> None:
        """Encode what one waiter after the other has, until it is what the key says."""
        while True:
            pixels = await self._pixels(flight)
            try:
                await self._encoding.encode(flight, pixels)
            except (ContentMismatch, SliceGone) as error:
                if not isinstance(pixels, StagedPixels):
                    raise
                blame(flight, pixels.slice, error)
            else:
                return
            finally:
                if isinstance(pixels, StagedPixels):
                    pixels.slice.end_read()
                else:
                    self._home.ingest.free(pixels.part)

    async def _pixels(self, flight: Flight) -> Pixels | StagedPixels:
        """What a waiter has staged, or else the bytes that it is asked for, one waiter after the other."""
        while (first := flight.first()) is not None:
            if (staged := first[0].slices.get(first[1])) is not None:
                if await is_written(flight, staged):
                    return StagedPixels(staged)
                continue
            async with first[0].window:
                answer = await self._supplied(flight, first)
                if answer is None:
                    continue
                (request, position), supplied = answer
                flight.stage = "decoded"
                self.placing.filling.add(flight)
                announcement = self._home.scheduler.announce()
                try:
                    return await self._decoded(flight, supplied, announcement)
                except ContentMismatch as error:
                    if (request, position) in flight.waiters:  # else its client has left meanwhile
                        flight.leave(request, position)
                        request.fail(position, error)
                finally:
                    self.placing.filling.discard(flight)
                    supplied.memory.release()
                    announcement.withdraw()  # ranks look again in the loop's next turn: it is in their queue by then
        raise AbandonedError

    async def _decoded(self, flight: Flight, supplied: Supplied, announcement: Announcement) -> Pixels:
        if not flight.waiters:
            raise AbandonedError
        decoders = self._home.decoders
        job = Job(supplied, flight.key, flow_of(flight), on_size=partial(self._sized, announcement))
        with flight.interrupted(lambda: decoders.move(job, flow_of(flight))):
            began_s = time.monotonic()
            pixels = await decoders.decode(job)
            self._home.stats.decode_seconds.observe(time.monotonic() - began_s)
            return pixels

    def _sized(self, announcement: Announcement, height: int, width: int, num_frames: int) -> None:
        _, num_patches, _ = decoded_sizes(height, width, num_frames, self._home.facts)
        announcement.sized(num_patches)

    async def _supplied(self, flight: Flight, first: Waiter) -> tuple[Waiter, Supplied] | None:
        """The bytes and whose they are; None when the first waiter will not send them, or keeps others waiting."""
        if flight.first() != first:  # it has left while it waited for its window
            return None
        flight.stage = "asked for from its client"
        request, position = first
        if flight.supplied is None or flight.supplied.done():
            flight.supplied = self._loop.create_future()
        request.ask(position)
        self._patience.begin(flight, flight.supplied)
        return await flight.supplied

    def _spawn(self, work: Coroutine[object, object, None], flights: Sequence[Flight]) -> None:
        """Run a task. A fault of ours in it fails its flights at once instead of at their deadline."""
        task = self._loop.create_task(work)
        self._tasks[task] = flights
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        flights = self._tasks.pop(task)
        if task.cancelled() or (fault := task.exception()) is None:
            return
        log.error("internal error", exc_info=fault)
        self._home.stats.errors["Internal"] += 1
        for flight in flights:
            flight.fail(EncodeFailed(f"internal error: {fault!r}"))
            self._home.flights.end(flight)
