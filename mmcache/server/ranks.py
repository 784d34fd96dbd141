"""The coordinator's side of the ranks: their processes, their pools, and their restarts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ipc.devices import num_devices
from ipc.pool import Extent
from mmcache.config import Settings
from mmcache.errors import CheckpointError, MMCacheError, SidecarError
from mmcache.server.calibrations import CalibrationCache
from mmcache.server.channel import Poller
from mmcache.server.children import Child, Spawn
from mmcache.server.digests import DigestCache
from mmcache.server.facts import ModelFacts
from mmcache.server.ingest import Ingest
from mmcache.server.pool_memory import PoolMemory
from mmcache.server.rank import Rank
from mmcache.server.slots import Death, Slot, counters, outage
from mmcache.server.state import StateFolder

log = logging.getLogger(__name__)

WARM_TIMEOUT_S = 30.0
"""A reload waits this long for a rank, when all of them are being restarted."""
LOAD_TIMEOUT_S = 600.0
"""A rank that has not loaded a model by then is replaced: what it reads from may never answer."""


class Ranks:
    """All ranks. `on_added` and `on_lost` tell the coordinator of ranks, `on_retired` of a pool that no rank can go on
    with, `on_evict` of extents that left a pool.

    Attributes:
        seed: of content keys.
        spawn: starts what does a rank's work.
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
        spawn: Spawn = Child,
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
        self.spawn = spawn
        self._loop = asyncio.get_running_loop()
        self._slots = [Slot(index) for index in range(settings.ranks)]
        self._num_devices = num_devices() if settings.device == "cuda" else 0
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._stopping = False
        self._is_switching = False
        self._warm = asyncio.Event()
        self.digests = DigestCache(StateFolder(settings.state).digests_file)
        self.calibrations = CalibrationCache(StateFolder(settings.state).calibrations_file)
        self.model = settings.model
        self.facts: ModelFacts | None = None

    @property
    def ready(self) -> list[Rank]:
        """Ranks that take work."""
        return [rank for slot in self._slots if (rank := slot.rank) is not None and rank.is_ready]

    @property
    def outage(self) -> str:
        """Why nothing can be encoded, and will not be soon; empty while a rank is ready, or one is expected to be."""
        return "" if self.ready else outage(self._slots)

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
        self.calibrations.load()
        for slot in self._slots:
            self._spawn(slot)
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

    def num_sharing(self, index: int) -> int:
        """How many ranks run on a rank's device."""
        return sum(self.device_of(other) == self.device_of(index) for other in range(len(self._slots)))

    def counters(self) -> dict[str, object]:
        """For the statistics: of all together, and of each by its number."""
        return {"ready": len(self.ready), "outage": self.outage, "pids": self.pids, **counters(self._slots)}

    def unmap(self, region: int) -> None:
        """A staging region is gone."""
        for rank in self._living():
            rank.unmap(region)

    def _spawn(self, slot: Slot) -> None:
        if self._stopping:
            return
        pool_id = slot.next_pool_id()
        try:
            slot.rank = Rank(slot.index, pool_id, self, self._settings, self._ingest, slot.left)
        except OSError as error:
            self._restart(slot, f"its process cannot be started: {error.strerror}", "spawn")

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
                why = SidecarError(f"it did not load a model within {LOAD_TIMEOUT_S:g} s")
                self.give_up(loads[load], why, "hung")
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
                self.give_up(rank, SidecarError("the model changed while it started"), "replaced")
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
        return [slot.rank for slot in self._slots if slot.rank is not None]

    def on_ready(self, rank: Rank) -> None:
        """A rank is warm."""
        self.facts = self.facts or rank.facts
        self._slots[rank.index].warmed_up()
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
            failure = CheckpointError(f"model = {self.model}: its files changed while the ranks read them")
            self.give_up(rank, failure, "replaced")
        else:
            rank.is_stale = True
            log.error("rank %d takes no work: the files of %s have changed; `mmcache reload`", rank.index, self.model)

    def _admit(self, rank: Rank) -> None:
        if rank.is_ready or rank.is_given_up:
            return
        rank.is_ready, rank.is_stale = True, False
        self._on_added(rank)
        if len(self.ready) == len(self._slots) and not self._started.done():
            self._started.set_result(None)

    def on_out_of_memory(self, rank: Rank) -> None:
        """A batch did not fit into a rank's memory. The rank goes on."""
        self._slots[rank.index].num_out_of_memory += 1

    def give_up(self, rank: Rank, failure: MMCacheError, death: Death) -> None:
        """A rank is of no use any more: it takes no work from now on, and is killed.

        What it has is lost when it is known to be dead, and no sooner: until then it may write.
        """
        if not rank.is_given_up:
            rank.is_given_up, rank.failure, rank.death = True, failure, death
            self._take_out(rank)
            rank.child.kill()

    def on_exit(self, rank: Rank, reason: str) -> None:
        """A rank is dead: its pool has lost its writer; a new one is started."""
        slot, memory = self._slots[rank.index], rank.memory
        slot.rank = None
        if memory is not None:
            slot.left = memory if memory.outlives_its_rank and not rank.has_lost_pool else None
            memory.lose_writer()
        self._take_out(rank)
        if memory is not None and slot.left is None:
            self._on_retired(memory)
        if self._stopping:
            return
        is_warm = rank.facts is not None
        death = rank.death or ("died" if is_warm else "start")
        self._restart(slot, str(rank.failure or reason), death, rank)

    def _take_out(self, rank: Rank) -> None:
        if rank.is_ready:
            rank.is_ready = False
            self._on_lost(rank)

    def _restart(self, slot: Slot, reason: str, death: Death, rank: Rank | None = None) -> None:
        if not self._started.done():
            failure = None if rank is None else rank.failure
            self._started.set_exception(failure or SidecarError(f"rank {slot.index} cannot start: {reason}"))
        if self._started.exception() is not None:
            return
        was_warm, has_worked = rank is not None and rank.facts is not None, rank is not None and rank.has_worked
        delay_s = slot.lost(reason, death, was_warm=was_warm, has_worked=has_worked)
        log.error("rank %d is lost: %s; restart in %.1f s", slot.index, reason, delay_s)
        self._loop.call_later(delay_s, self._spawn, slot)
