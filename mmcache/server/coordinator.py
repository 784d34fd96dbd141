"""The one place that decides hit or miss, owns the index, and moves a miss through the parts. No torch, no data."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
from time import monotonic
from typing import TYPE_CHECKING, Any

from ipc.errors import ControlExhausted
from ipc.pool import Extent
from mmcache._version import __version__
from mmcache.config import Settings
from mmcache.errors import TooManyLeases
from mmcache.foreign import ForeignModel
from mmcache.keys import Fingerprint
from mmcache.protocol import PROTOCOL_VERSION, Welcome
from mmcache.records import GRANT_HEAD, ORIGINS
from mmcache.server.background import Background
from mmcache.server.channel import Poller
from mmcache.server.children import Child, Spawn
from mmcache.server.connection import Connection
from mmcache.server.decoders import Decoders
from mmcache.server.evictions import Evictions
from mmcache.server.facts import ModelFacts
from mmcache.server.flight import Flight
from mmcache.server.flights import Flights
from mmcache.server.ingest import Ingest
from mmcache.server.lag import LoopLag
from mmcache.server.lease_limit import LeaseLimit
from mmcache.server.misses import MissPath
from mmcache.server.offers import OpenOffers
from mmcache.server.pool_memory import PoolMemory
from mmcache.server.pools import Pools
from mmcache.server.rank import Rank
from mmcache.server.ranks import Ranks
from mmcache.server.reload import Reloads
from mmcache.server.requests import Request
from mmcache.server.scheduler import Scheduler
from mmcache.server.stage_frames import claim_slices
from mmcache.server.staging import StagingDesk
from mmcache.server.stats import Stats, snapshot
from mmcache.server.verify import Verifier
from mmcache.tiers.tiered import TieredStore

if TYPE_CHECKING:
    from mmcache.server.front import Front

log = logging.getLogger(__name__)

POOL, STORE = ORIGINS.index("pool"), ORIGINS.index("store")
SWEEP_INTERVAL_S = 0.25
STORE_CLOSE_TIMEOUT_S = 5.0


class Coordinator:
    """Serves connections. Runs on one event loop and one thread."""

    def __init__(
        self, settings: Settings, seed: int, ingest: Ingest, store: TieredStore,
        *, spawn_rank: Spawn = Child, may_spin: bool = True,
    ) -> None:  # fmt: skip
        """`may_spin`: whether it polls for a moment when more is expected instead of sleeping: not beside an engine."""
        self._loop = asyncio.get_running_loop()
        self.poller = Poller(self._loop, may_spin=may_spin)
        self.settings = settings
        self.stats = Stats()
        self.store = store
        self.ingest = ingest
        self.decoders = Decoders(
            self.poller, ingest, seed, settings.max_pixels, settings.orientation, settings.decode_timeout_s,
            num_processes=settings.decoders,
        )  # fmt: skip
        self.offers = OpenOffers()
        self.staging = StagingDesk(settings.staging_bytes, settings.staging_bytes_total)
        self.pools = Pools(self.offers.lost, self.staging.lost)
        self.ranks = Ranks(
            self.poller, settings, seed, ingest, self.staging.fd_of, self._rank_added,
            self.pools.lose, self._pool_retired, self.pools.evicted, spawn_rank,
        )  # fmt: skip
        self.staging.on_gone = self.ranks.unmap
        self.connections: set[Connection] = set()
        self._seed = seed
        self._facts: ModelFacts | None = None
        self.flights = Flights(self, settings.max_queued_items)
        self.misses = MissPath(self)
        self.scheduler = Scheduler(
            lambda: self.ranks.ready, lambda: self.misses.waits_for_room, settings.max_batch_patches,
            settings.batch_wait_ms / 1000,
        )  # fmt: skip
        self.ranks.on_switch = self.scheduler.recall
        self.verifier = Verifier(self, settings.verify_sample, random.Random(seed))  # noqa: S311  # no secret
        self.reloads = Reloads(self)
        self.evictions = Evictions(self)
        self.background = Background(self.stats)
        self.lag = LoopLag()
        self.front: Front | None = None
        self.lease_limit = LeaseLimit(settings.lease_limit_s, settings.lease_limit_action)
        self._a_close = asyncio.Event()

    @property
    def facts(self) -> ModelFacts:
        """The model that is served."""
        assert self._facts is not None, "no client is let in before the ranks are ready"
        return self._facts

    @property
    def fingerprint(self) -> Fingerprint:
        """What decides an embedding besides the content."""
        return self.facts.fingerprint

    async def start(self) -> None:
        """Start the ranks and wait until they are warm. Raises what `Ranks.start` raises."""
        self._facts, _ = await asyncio.gather(self.ranks.start(), self.decoders.start())
        self._loop.call_later(SWEEP_INTERVAL_S, self._sweep_regularly)
        self.lag.start()

    def accept(self, sock: socket.socket) -> None:
        """A client connected."""
        self.connections.add(Connection(self, sock))

    def welcome(self, foreign: ForeignModel | None = None) -> Welcome:
        """What a client is told."""
        return Welcome(
            protocol=PROTOCOL_VERSION, version=__version__, seed=self._seed, fingerprint=str(self.fingerprint),
            model=self.facts.model, dtype=self.facts.dtype, dim=self.facts.dim,
            control_words=self.settings.control_words, max_item_bytes=self.settings.max_item_bytes,
            max_pixels=self.settings.max_pixels, orientation=self.settings.orientation,
            processor=self.facts.processor.canonical(), foreign="" if foreign is None else str(foreign.fingerprint),
        )  # fmt: skip

    def adopt(self, facts: ModelFacts) -> None:
        """The ranks have this model from now on: nothing of another one is found any more, and every client is told.

        Leases on embeddings of the one before stay valid.
        """
        before, self._facts = self.facts, facts
        if facts.fingerprint != before.fingerprint:
            self.pools.withdraw_all()
        if facts != before:
            for connection in self._open_connections():
                connection.tell_model(facts)

    def closed(self) -> None:
        """A connection's socket was closed."""
        self._a_close.set()

    def forget(self, connection: Connection) -> None:
        """A connection has nothing left."""
        self.connections.discard(connection)

    def serve_batch(self, request: Request) -> None:
        """Look up, deduplicate, and reply with what is there; what is not is looked for, encoded, placed and sent."""
        self.stats.requests += 1
        self.stats.items += len(request.keys)
        request.began_s = began_s = monotonic()
        misses = self._look_up(request)
        self.stats.lookup_seconds.observe(monotonic() - began_s)
        if request.staged:
            misses = claim_slices(request, misses)
        if misses:
            request.wait()
            if new := self.flights.join(request, misses):
                self.misses.start(new)
        request.flush()

    def _look_up(self, request: Request) -> list[int]:
        """Grant every position that the pool has. Returns the others."""
        holder, keys, pack = request.holder, request.keys, GRANT_HEAD.pack
        found = list(map(self.pools.index.get, keys))
        extents = [extent for extent in found if extent is not None]
        if len(extents) == len(keys):
            hits, misses = list(range(len(keys))), list[int]()
        else:
            hits = [position for position, extent in enumerate(found) if extent is not None]
            misses = [position for position, extent in enumerate(found) if extent is None]
        shares = holder.grant_all(extents, holder.now())
        records: list[Any] = []
        for position, share, extent in zip(hits, shares, extents, strict=False):
            records += (pack(position, share.slot, share.generation, POOL), extent.info)
        request.shares = dict(zip(hits, shares, strict=False))
        request.send_hits(records)
        for position, extent in zip(hits[len(shares) :], extents[len(shares) :], strict=True):  # no word was left
            self._grant(request, position, extent, POOL)
        self.stats.hit_pool += len(extents)
        self.verifier.pool_hits(request, misses)
        return misses

    def settle_anew(self, flight: Flight) -> None:
        """What was taken back from its waiters is looked up again; they wait with `flight` no longer."""
        waiters, flight.waiters = flight.waiters, {}
        new: list[Flight] = []
        for request, position in waiters:
            if (extent := self.pools.get(request.keys[position])) is not None:
                self._grant(request, position, extent, POOL)
            else:
                new += self.flights.join(request, [position], has_waited=True)
        if new:
            self.misses.start(new)

    def publish(
        self, flight: Flight, rank: Rank, extent: Extent, seconds: float, shape: tuple[int, ...], origin: int
    ) -> bool:
        """The bytes are complete and guarded: cache them, and grant what is cached to everyone who waits.

        As `cache`, it is False if that is another's.
        """
        is_new = self.pools.cache(flight, rank, extent, seconds, shape)
        extent = self.pools.index[flight.key]
        waiters, flight.waiters = flight.waiters, {}
        for request, position in waiters:
            self._grant(request, position, extent, origin)
        if origin == STORE:
            self.verifier.store_hits(waiters)
        return is_new

    def _grant(self, request: Request, position: int, extent: Extent, origin: int) -> None:
        holder = request.holder
        try:
            share = holder.grant(extent)
        except ControlExhausted:
            if not holder.sweep():
                words = holder.control.num_words
                reason = f"{holder.num_active} leases are held, as many as {words} control words allow (control_words)"
                request.fail(position, TooManyLeases(f"{reason}; release some"))
                return
            share = holder.grant(extent)
        request.send_grant(position, share, extent, origin)

    @property
    def has_time(self) -> bool:
        """Whether no request waits for a decoder, a rank, or room in a pool."""
        return self.decoders.is_idle and not self.misses.waits_for_room and not len(self.scheduler)

    def _rank_added(self, rank: Rank) -> None:
        assert rank.memory is not None, "it is warm"
        self.scheduler.serve(rank)
        if self.pools.add(rank, rank.memory):
            for connection in self._open_connections():
                connection.add_pool(rank.memory)

    def _pool_retired(self, memory: PoolMemory) -> None:
        self.pools.retire(memory)
        for connection in self._open_connections():
            connection.drop_pool(memory.pool_id)

    def _open_connections(self) -> list[Connection]:
        return [connection for connection in self.connections if connection.is_open]

    def sweep(self) -> None:
        """End the leases that clients acknowledged, and give back pools that nobody reads any more."""
        for connection in list(self.connections):
            connection.sweep()
        self.pools.sweep()

    def _sweep_regularly(self) -> None:
        self.sweep()
        self.lease_limit.enforce(self)
        self.flights.end_outage()
        self._loop.call_later(SWEEP_INTERVAL_S, self._sweep_regularly)

    def snapshot(self) -> dict[str, object]:
        """The counters, current."""
        self.sweep()
        return snapshot(self)

    async def drain(self, timeout_s: float) -> None:
        """Finish what is in flight, within the time; then close every connection and end the processes."""
        deadline = self._loop.time() + timeout_s
        self.verifier.stop()
        for connection in list(self.connections):
            connection.close_when_idle()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                while any(connection.is_open for connection in self.connections):
                    self._a_close.clear()
                    await self._a_close.wait()
        for connection in list(self.connections):
            connection.close()
        await self.store.drain(max(0.0, deadline - self._loop.time()))

    async def stop(self) -> None:
        """End the processes and give the memory back. Who holds a lease reads on."""
        self.reloads.cancel()
        await asyncio.gather(self.ranks.stop(2.0), self.decoders.stop(2.0))
        self.misses.cancel()
        self.background.cancel()
        self.verifier.cancel()
        if not await self.store.close(STORE_CLOSE_TIMEOUT_S):
            log.error("the store did not close within %.0f s; a write or read of it hangs", STORE_CLOSE_TIMEOUT_S)
        for connection in list(self.connections):
            connection.end("the sidecar has ended")
        self.pools.close()
        self.ingest.close()
