"""The way of a miss: look in the store, else ask for the bytes, decode, place, encode, publish, write behind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING

from encoder.errors import ImageError
from encoder.sharding import assign
from encoder.sizing import Grid, grid_thw, num_patches, num_tokens
from ipc.errors import ExtentTooLarge
from ipc.pool import Extent
from mmcache.errors import ContentMismatch, EncodeFailed, ItemError, PoolExhausted, UnsupportedItem
from mmcache.keys import ContentKey, Fingerprint, store_key
from mmcache.records import ORIGINS
from mmcache.server.batcher import EncodeJob, RankLostError, RecalledError
from mmcache.server.decoders import Pixels, Supplied
from mmcache.server.facts import ModelFacts
from mmcache.server.rank import Rank
from mmcache.server.requests import Flight, Waiter
from mmcache.tiers.base import Entry

if TYPE_CHECKING:
    from mmcache.server.coordinator import Coordinator

log = logging.getLogger(__name__)

ENCODED, STORE = ORIGINS.index("encoded"), ORIGINS.index("store")
SUPPLY_PATIENCE_S = 1.0
"""A client that has not sent bytes after this long is asked no longer alone, if another client waits for them too."""
MAX_TRIES = 2
"""Of encoding one item with one model."""
ROOM_POLL_S = 0.001
"""While requests wait for room, acknowledgements are looked for this often; nothing is polled otherwise."""


class _Abandoned(Exception):
    """Nobody waits for this flight any more."""


class MissPath:
    """Carries flights through the coordinator's parts. Each flight is a task; none outlives its waiters' interest."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._home = coordinator
        self._loop = asyncio.get_running_loop()
        self._room_turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def waits_for_room(self) -> bool:
        """Whether any flight does."""
        return self._room_turn.locked()

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
        keys = [store_key(fingerprint, ContentKey(flight.key)) for flight in flights]
        entries = await self._home.store.find(keys)
        is_wrong = self._home.verifier.is_condemned
        return [None if is_wrong(key) else entry for key, entry in zip(keys, entries, strict=True)]

    async def _fly(self, flight: Flight, entry: Entry | None, fingerprint: Fingerprint) -> None:
        try:
            while entry is None or not await self._promote(flight, entry, fingerprint):
                if fingerprint == self._home.fingerprint:
                    await self._encode(flight)
                    break
                fingerprint = self._home.fingerprint  # the model changed meanwhile: the store is asked for the new one
                (entry,) = await self._find([flight], fingerprint)
        except ItemError as error:
            flight.fail(error)
        except _Abandoned:
            pass
        finally:
            self._home.end(flight)

    async def _promote(self, flight: Flight, entry: Entry, fingerprint: Fingerprint) -> bool:
        """Store to pool. False when the store's copy is of no use after all, or not to the model served by then."""
        tokens, dim = entry.shape
        facts, ingest = self._home.facts, self._home.ingest
        if dim != facts.dim or entry.dtype != facts.dtype or entry.nbytes > ingest.region.nbytes:
            return False
        flight.stage = "read from the store"
        part = await ingest.reserve(entry.nbytes)
        try:
            if not await self._home.store.read(entry, ingest.memory(part)):
                return False
            rank, extent = await self._place(flight, entry.nbytes, 0)
            await rank.copy(part.offset, extent)
        except RankLostError:
            return False
        finally:
            ingest.free(part)
        # The rank died right after its answer, or the model changed.
        if rank.pool.is_retired or fingerprint != self._home.fingerprint:
            rank.pool.abandon(extent)
            return False
        self._home.stats.hit_store += 1
        self._home.publish(flight, rank, extent, entry.encode_seconds, (tokens, *entry.grid_thw), STORE)
        return True

    async def _encode(self, flight: Flight) -> None:
        pixels = await self._pixels(flight)
        try:
            await self._encode_pixels(flight, pixels)
        finally:
            self._home.ingest.free(pixels.part)

    async def _pixels(self, flight: Flight) -> Pixels:
        """Ask one waiter after the other for the bytes until one sends those of the key."""
        while (first := flight.first()) is not None:
            async with first[0].window:
                answer = await self._supplied(flight, first)
                if answer is None:
                    continue
                (request, position), supplied = answer
                flight.stage = "decoded"
                try:
                    return await self._home.decoders.decode(supplied, flight.key)
                except ContentMismatch as error:
                    if (request, position) in flight.waiters:  # else its client has left meanwhile
                        flight.leave(request, position)
                        request.fail(position, error)
                finally:
                    supplied.memory.release()
        raise _Abandoned

    async def _supplied(self, flight: Flight, first: Waiter) -> tuple[Waiter, Supplied] | None:
        """The bytes and whose they are; None when the first waiter will not send them, or keeps others waiting."""
        if flight.first() != first:  # it has left while it waited for its window
            return None
        flight.stage = "asked for from its client"
        request, position = first
        if flight.supplied is None or flight.supplied.done():
            flight.supplied = self._loop.create_future()
        request.ask(position)
        while True:
            done, _ = await asyncio.wait([flight.supplied], timeout=SUPPLY_PATIENCE_S)
            if done:
                return flight.supplied.result()
            if flight.pass_on():
                return None

    async def _encode_pixels(self, flight: Flight, pixels: Pixels) -> None:
        failure = EncodeFailed("the ranks died while encoding it")
        num_tries = 0
        while num_tries < MAX_TRIES:
            served = self._home.facts
            try:
                if await self._encode_once(flight, pixels, served):
                    return
            except EncodeFailed as error:
                failure = error
            except ItemError:
                if served.fingerprint == self._home.fingerprint:
                    raise
            # A model that came meanwhile has all its tries.
            num_tries = num_tries + 1 if served.fingerprint == self._home.fingerprint else 0
        raise failure

    async def _encode_once(self, flight: Flight, pixels: Pixels, served: ModelFacts) -> bool:
        """Place, encode and publish an item. False when its rank died, or when `served` is not served any more."""
        grid, patches, tokens = sizes(pixels, served)
        rank, extent = await self._place(flight, tokens * served.token_bytes, patches)
        flight.stage = "encoded"
        seconds = None
        try:
            if served.fingerprint == self._home.fingerprint:
                job = EncodeJob(pixels, extent, patches, tokens, rank.cost.item_seconds(patches))
                seconds = await rank.batcher.submit(job)
        except (RankLostError, RecalledError):
            pass
        except ItemError:
            rank.pool.abandon(extent)
            raise
        # The rank died, maybe right after its answer, or the model changed.
        if seconds is None or rank.pool.is_retired or served.fingerprint != self._home.fingerprint:
            rank.pool.abandon(extent)
            return False
        self._home.stats.encoded += 1
        self._home.stats.encode_seconds += seconds
        self._home.publish(flight, rank, extent, seconds, (tokens, *grid), ENCODED)
        self._write_behind(rank, extent, (tokens, *grid))
        return True

    async def _place(self, flight: Flight, nbytes: int, patches: int) -> tuple[Rank, Extent]:
        """Choose a rank and reserve room in its pool; whoever came first is served first.

        Raises:
            PoolExhausted: it could never fit.
        """
        flight.stage = "waiting for room in the pool"
        flight.waits_for_room = True
        try:
            async with self._room_turn:
                while flight.waiters:
                    if (placed := self._try_place(nbytes, patches)) is not None:
                        return placed
                    self._home.stats.room_waits += 1
                    self._home.sweep()
                    await asyncio.sleep(ROOM_POLL_S)
        finally:
            flight.waits_for_room = False
        raise _Abandoned

    def _try_place(self, nbytes: int, patches: int) -> tuple[Rank, Extent] | None:
        ranks = self._home.ranks.ready
        if not ranks:
            return None
        cost_s = ranks[0].cost.item_seconds(patches)
        (best,) = assign([cost_s], [rank.batcher.queued_s for rank in ranks])
        for rank in (ranks[best], *ranks[:best], *ranks[best + 1 :]):
            try:
                extent = rank.pool.reserve(nbytes)
            except ExtentTooLarge as error:
                raise PoolExhausted(f"{error}; raise pool_bytes") from error
            if extent is not None:
                return rank, extent
        return None

    def _write_behind(self, rank: Rank, extent: Extent, shape: tuple[int, ...]) -> None:
        assert extent.key is not None, "it was published"
        rank.pool.pin(extent)
        self._home.store.put_behind(
            key=store_key(self._home.fingerprint, ContentKey(extent.key)),
            shape=(shape[0], self._home.facts.dim),
            dtype=self._home.facts.dtype,
            grid_thw=(shape[1], shape[2], shape[3]),
            encode_seconds=extent.cost_seconds,
            payload=rank.payload(extent),
            done=lambda: rank.pool.unpin(extent),
        )

    def _spawn(self, work: Coroutine[object, object, None], flights: Sequence[Flight]) -> None:
        """Run a task. A fault of ours in it fails its flights at once instead of at their deadline."""
        task = self._loop.create_task(work)
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if task.cancelled() or (fault := task.exception()) is None:
                return
            log.error("internal error", exc_info=fault)
            self._home.stats.errors["Internal"] += 1
            for flight in flights:
                flight.fail(EncodeFailed(f"internal error: {fault!r}"))
                self._home.end(flight)

        task.add_done_callback(ended)


def sizes(pixels: Pixels, facts: ModelFacts) -> tuple[Grid, int, int]:
    """Grid, patches and tokens of a decoded item.

    Raises:
        UnsupportedItem: the model does not take a chunk of that many frames.
    """
    try:
        grid = grid_thw(pixels.width, pixels.height, facts.processor, pixels.num_frames)
    except ImageError as error:
        raise UnsupportedItem(str(error)) from error
    return grid, num_patches(grid), num_tokens(grid, facts.processor.merge_size)
