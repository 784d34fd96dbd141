"""The coordinator's side of the ranks: their processes, their pools, and their restarts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ipc.devices import num_devices
from ipc.pool import Extent
from mmcache.config import Settings
from mmcache.errors import CheckpointError, MMCacheError, SidecarError
from mmcache.server.channel import Poller
from mmcache.server.children import restart_delay_s
from mmcache.server.digests import DigestCache
from mmcache.server.facts import ModelFacts
from mmcache.server.ingest import Ingest
from mmcache.server.pool_memory import PoolMemory
from mmcache.server.rank import Rank
from mmcache.server.state import StateFolder

log = logging.getLogger(__name__)

WARM_TIMEOUT_S = 30.0
"""A reload waits this long for a rank, when all of them are being restarted."""
HOPELESS_DEATHS = 3
"""In a row, none of them warm: nobody is expected to come back soon."""
LOAD_TIMEOUT_S = 600.0
"""A rank that has not loaded a model by then is replaced: what it reads from may never answer."""


class Ranks:
    """All ranks. `on_added` and `on_lost` tell the coordinator of ranks, `on_retired` of a pool that no rank can go on
    with, `on_evict` of extents that left a pool.

    Attributes:
        seed: of content keys.
        region_fd: gives the descriptor of a staging region, None if it is gone.
        model: what a rank that starts is told to load.
        on_switch: told when another model is served from now on, before any rank begins with it.
        facts: what a rank must have loaded to take work; None before the first is warm.
    """

    def __init__(
        self,
        poller: Poller,
        settings: Settings,
        seed: int,
        ingest: Ingest,
        region_fd: Callable[[int], int | None],
        on_added: Callable[[Rank], None],
        on_lost: Callable[[Rank], None],
        on_retired: Callable[[PoolMemory], None],
        on_evict: Callable[[Extent], None],
    ) -> None:
        self.poller = poller
        self._settings = settings
        self.seed = seed
        self.region_fd = region_fd
        self._ingest = ingest
        self._on_added = on_added
        self._on_lost = on_lost
        self._on_retired = on_retired
        self.on_evict = on_evict
        self.on_switch: Callable[[], None] = lambda: None
        self._loop = asyncio.get_running_loop()
        self._slots: list[Rank | None] = [None] * settings.ranks
        self._left: list[PoolMemory | None] = [None] * settings.ranks
        self._num_devices = num_devices() if settings.device == "cuda" else 0
        self._incarnations = [0] * settings.ranks
        self._deaths_in_a_row = [0] * settings.ranks
        self._reasons: dict[int, str] = {}
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._stopping = False
        self._is_switching = False
        self._warm = asyncio.Event()
        self.digests = DigestCache(StateFolder(settings.state).digests_file)
        self.model = settings.model
        self.facts: ModelFacts | None = None
        self.num_restarts = 0

    @property
    def ready(self) -> list[Rank]:
        """Ranks that take work."""
        return [rank for rank in self._slots if rank is not None and rank.is_ready]

    @property
    def outage(self) -> str:
        """Why nothing can be encoded, and will not be soon; empty while a rank is ready, or one is expected to be."""
        if self.ready or min(self._deaths_in_a_row) < HOPELESS_DEATHS:
            return ""
        return "; ".join(f"rank {index}: {reason}" for index, reason in sorted(self._reasons.items()))

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks that are alive."""
        return [rank.child.pid for rank in self._living()]

    async def start(self) -> ModelFacts:
        """Start every rank and wait until all are warm.

        Raises:
            CheckpointError, ConfigError, SidecarError: a rank cannot start; the message says why.
        """
        self.digests.load()
        for index in range(len(self._slots)):
            self._spawn(index)
        await self._started
        assert self.facts is not None, "a ready rank brings the facts"
        return self.facts

    async def stop(self, timeout_s: float) -> None:
        """End every rank."""
        self._stopping = True
        await asyncio.gather(*(rank.child.stop(timeout_s) for rank in self._living()))

    def device_of(self, index: int) -> str:
        """What a rank calls the device that it runs on. More ranks than devices share them."""
        return f"cuda:{index % self._num_devices}" if self._num_devices else "cpu"

    def unmap(self, region: int) -> None:
        """A staging region is gone."""
        for rank in self._living():
            rank.unmap(region)

    def _spawn(self, index: int) -> None:
        if self._stopping:
            return
        self._incarnations[index] += 1
        pool_id = self._incarnations[index] << 8 | index
        try:
            self._slots[index] = Rank(index, pool_id, self, self._settings, self._ingest, self._left[index])
        except OSError as error:
            self._restart(index, f"its process cannot be started: {error.strerror}")

    async def load(self, model: str) -> ModelFacts:
        """Every rank that is warm loads a model beside its own and goes on. All do, or none has it afterwards.

        Raises:
            ConfigError, CheckpointError, SidecarError: why one of them did not.
        """
        await self._one_warm_rank(model)
        try:
            while missing := [rank for rank in self._living() if rank.facts is not None and rank.next is None]:
                await self._all_done({rank.load(model): rank for rank in missing})
            found = [rank.next[0] for rank in self._living() if rank.next is not None]
            if not found:
                raise SidecarError(f"model = {model}: no rank is alive any more")
            if len({facts.fingerprint for facts in found}) > 1:
                raise CheckpointError(f"model = {model}: its files changed while the ranks read them; try again")
        except BaseException:
            self.unload()
            raise
        return found[0]

    async def _all_done(self, loads: dict[asyncio.Future[None], Rank]) -> None:
        """Wait for all, however each ends; then raise the first failure. Who cancels this cancels them."""
        try:
            _, late = await asyncio.wait(loads, timeout=LOAD_TIMEOUT_S)
            for load in late:
                loads[load].failure = SidecarError(f"it did not load a model within {LOAD_TIMEOUT_S:g} s")
                loads[load].child.kill()
            if late:  # its death is their failure
                await asyncio.wait(late)
        except asyncio.CancelledError:
            for load in loads:
                load.cancel()
            raise
        for failure in filter(None, [load.exception() for load in loads]):
            raise failure

    async def pause(self) -> None:
        """Begin no batch; returns when none is running. Ends with `switch` or `unload`."""
        self._is_switching = True
        await asyncio.gather(*(rank.batcher.pause() for rank in self.ready))

    def switch(self, facts: ModelFacts) -> None:
        """What every rank has loaded is served from now on. A rank that has not, starts anew with it."""
        assert self.facts is not None, "a model is served"
        is_new, before = facts.fingerprint != self.facts.fingerprint, self.ready
        self.model, self.facts, self._is_switching = facts.model, facts, False
        for rank in self._living():
            if rank.next is not None:
                rank.swap()
            if rank.facts is not None and rank.facts.fingerprint == facts.fingerprint:
                self._admit(rank)
            elif is_new:
                assert not rank.is_ready, "every rank at work has loaded it"
                rank.failure = SidecarError("the model changed while it started")
                rank.child.kill()
        if is_new:
            self.on_switch()
        for rank in before:
            if is_new:
                rank.batcher.recall()
            rank.batcher.resume()

    def unload(self) -> None:
        """All stays as it is: what was loaded for `switch` is dropped."""
        self._is_switching = False
        for rank in self._living():
            rank.unload()
            rank.batcher.resume()
            if rank.facts is not None:
                self._consider(rank)

    async def _one_warm_rank(self, model: str) -> None:
        try:
            async with asyncio.timeout(WARM_TIMEOUT_S):
                while not any(rank.facts is not None for rank in self._living()):
                    self._warm.clear()
                    await self._warm.wait()
        except TimeoutError:
            raise SidecarError(f"model = {model}: no rank is alive to load it; restart the sidecar") from None

    def _living(self) -> list[Rank]:
        return [rank for rank in self._slots if rank is not None]

    def on_ready(self, rank: Rank) -> None:
        """A rank is warm."""
        self.facts = self.facts or rank.facts
        self._deaths_in_a_row[rank.index] = 0
        self._warm.set()
        self._consider(rank)

    def _consider(self, rank: Rank) -> None:
        """Let a warm rank take work if its model is the one that is served; else it waits for a reload."""
        assert self.facts is not None, "a model is served"
        assert rank.facts is not None, "it is warm"
        if rank.facts.fingerprint == self.facts.fingerprint:
            if not self._is_switching:
                self._admit(rank)
        elif not self._started.done():
            rank.failure = CheckpointError(f"model = {self.model}: its files changed while the ranks read them")
            rank.child.kill()
        else:
            log.error("rank %d takes no work: the files of %s have changed; `mmcache reload`", rank.index, self.model)

    def _admit(self, rank: Rank) -> None:
        if rank.is_ready:
            return
        rank.is_ready = True
        self._on_added(rank)
        if len(self.ready) == len(self._slots) and not self._started.done():
            self._started.set_result(None)

    def on_exit(self, rank: Rank, reason: str) -> None:
        """A rank is dead: its pool has lost its writer; a new one is started."""
        self._slots[rank.index] = None
        memory = rank.memory
        if memory is not None:
            self._left[rank.index] = memory if memory.outlives_its_rank and not rank.has_lost_pool else None
            memory.lose_writer()
        if rank.is_ready:
            rank.is_ready = False
            self._on_lost(rank)
        if memory is not None and self._left[rank.index] is None:
            self._on_retired(memory)
        if not self._stopping:
            self._restart(rank.index, str(rank.failure or reason), rank.failure)

    def _restart(self, index: int, reason: str, failure: MMCacheError | None = None) -> None:
        if not self._started.done():
            self._started.set_exception(failure or SidecarError(f"rank {index} cannot start: {reason}"))
        if self._started.exception() is not None:
            return
        delay_s = restart_delay_s(self._deaths_in_a_row[index])
        log.error("rank %d is lost: %s; restart in %.1f s", index, reason, delay_s)
        self._deaths_in_a_row[index] += 1
        self._reasons[index] = reason
        self.num_restarts += 1
        self._loop.call_later(delay_s, self._spawn, index)
