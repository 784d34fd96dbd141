"""From pixels to a published embedding: through the queue for ranks, or that for room; again where a rank failed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from mmcache.errors import ItemError
from mmcache.records import ORIGINS
from mmcache.server.batcher import BatchFailedError, RankLostError, RecalledError
from mmcache.server.behind import WriteBehind
from mmcache.server.decoders import Pixels
from mmcache.server.facts import ModelFacts
from mmcache.server.flight import AbandonedError, Flight
from mmcache.server.flows import flow_of
from mmcache.server.microbatch import EncodeJob
from mmcache.server.placing import Placing
from mmcache.server.retries import Retries
from mmcache.server.scheduler import NoRoomError
from mmcache.server.sources import sizes
from mmcache.server.staged import StagedPixels

if TYPE_CHECKING:
    from mmcache.server.coordinator import Coordinator

ENCODED = ORIGINS.index("encoded")


class Encoding:
    """Has flights encoded, one item after another. The caller keeps the pixels until it is told."""

    def __init__(self, coordinator: Coordinator, placing: Placing, behind: WriteBehind) -> None:
        self._home = coordinator
        self._placing = placing
        self._behind = behind

    async def encode(self, flight: Flight, pixels: Pixels | StagedPixels) -> None:
        """Encode and publish an item.

        Raises:
            ItemError: it cannot be encoded, or not from these pixels.
            AbandonedError: nobody waits for it, and no rank has begun with it.
            GaveWayError: see `Placing.place`.
        """
        retries = Retries()
        served = self._home.facts
        while not await self._encode_once(flight, pixels, served, retries):
            if served.fingerprint != self._home.fingerprint:  # the model that came meanwhile has all its tries
                retries = Retries()
            served = self._home.facts

    async def _encode_once(
        self, flight: Flight, pixels: Pixels | StagedPixels, served: ModelFacts, retries: Retries
    ) -> bool:
        """One try. False when it failed and there may be another, or when `served` is not served any more."""
        grid, patches, tokens = sizes(pixels, served)
        job = EncodeJob(
            pixels, patches, tokens, tokens * served.token_bytes, self._home.scheduler.item_seconds(patches), flight,
            limit_patches=retries.limit_patches, avoid=retries.avoid,
        )  # fmt: skip
        seconds = None
        try:
            seconds = await self._seconds(flight, job, served, retries)
        finally:
            if seconds is None and job.rank is not None and job.extent is not None:
                job.rank.pool.abandon(job.extent)
        if seconds is None:
            return False
        assert job.rank is not None, "a rank encoded it"
        assert job.extent is not None, "it has written it"
        self._home.stats.encoded += 1
        self._home.stats.encode_seconds += seconds
        if self._home.publish(flight, job.rank, job.extent, seconds, (tokens, *grid), ENCODED):
            self._behind.write(job.rank, job.extent, (tokens, *grid))
        if isinstance(pixels, StagedPixels):  # whoever needed it may have left
            pixels.slice.cached(job.rank.pool, self._home.pools.index[flight.key])
        return True

    async def _seconds(self, flight: Flight, job: EncodeJob, served: ModelFacts, retries: Retries) -> float | None:
        """What a try took. None when it is of no use: the rank failed or died, or the model changed.

        Raises as `encode`.
        """
        try:
            seconds = await self._run(flight, job, served)
            if job.extent is not None and job.extent.is_lost:
                raise RankLostError  # it died right after its answer
        except RecalledError:
            return None
        except (BatchFailedError, RankLostError) as failure:
            if served.fingerprint == self._home.fingerprint:
                retries.failed(failure, job.rank)
                self._home.scheduler.batches.num_retried += 1
            return None
        except ItemError:
            if served.fingerprint == self._home.fingerprint:
                raise
            return None
        return seconds if served.fingerprint == self._home.fingerprint else None

    async def _run(self, flight: Flight, job: EncodeJob, served: ModelFacts) -> float:
        """Bind it to a rank when its turn comes, and wait for the answer. Raises as the batcher and `Placing.place`."""
        self._placing.check_size(job.nbytes)
        if not flight.waiters:
            raise AbandonedError
        try:
            flight.stage = "waiting for a rank"
            return await self._follow(flight, job, self._home.scheduler.put(job, flow_of(flight)))
        except NoRoomError:
            rank, extent = await self._placing.place(
                flight, job.nbytes, job.num_patches, may_give_way=True, avoid=job.avoid
            )
        if served.fingerprint != self._home.fingerprint:
            rank.pool.abandon(extent)
            raise RecalledError
        job.done = asyncio.get_running_loop().create_future()
        return await self._follow(flight, job, rank.batcher.submit(job.bind(rank, extent)))

    async def _follow(self, flight: Flight, job: EncodeJob, done: asyncio.Future[float]) -> float:
        """Until it begins it is given up as soon as nobody waits for it, and is theirs who wait."""
        scheduler = self._home.scheduler

        def changed() -> None:
            if flight.waiters:
                scheduler.move(job, flow_of(flight))
            else:
                scheduler.give_up(job, AbandonedError())

        flight.on_change = changed
        try:
            return await done
        finally:
            flight.on_change = None
