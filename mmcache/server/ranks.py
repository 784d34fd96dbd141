"""The coordinator's side of the ranks: their processes, their pools, and their restarts."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

from encoder.config import ProcessorConfig
from encoder.sharding import CostModel
from ipc.errors import MemoryUnavailable
from ipc.memory_shm import SEALS_READERS, ReadOnlyRegion
from ipc.pool import Extent, Pool
from mmcache.config import Settings
from mmcache.errors import CheckpointError, ConfigError, MMCacheError, SidecarError
from mmcache.keys import Fingerprint, fingerprint
from mmcache.protocol import Frame, Kind, close_all, pack_frame, parse
from mmcache.server.batcher import Batcher, RankLostError
from mmcache.server.channel import Poller
from mmcache.server.children import Child, restart_delay_s
from mmcache.server.ingest import Ingest
from mmcache.server.messages import Copied, Copy, Ran, RankReady, Run, StartFailed, StartRank
from mmcache.transport import take_descriptors

log = logging.getLogger(__name__)

MODULE = "mmcache.server.rank_process"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What every rank must agree on."""

    model: str
    fingerprint: Fingerprint
    dtype: str
    dim: int
    numerics_version: int
    processor: ProcessorConfig

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's embedding."""
        return self.dim * {"float32": 4, "bfloat16": 2}[self.dtype]


class Rank:
    """One living rank: its process, its pool and its queue. A restart makes a new one."""

    def __init__(self, index: int, pool_id: int, ranks: Ranks, settings: Settings, ingest: Ingest) -> None:
        self.index = index
        self.pool_id = pool_id
        self.cost = CostModel(0.0, 0.0, 0.0)
        self.is_ready = False
        self.failure: MMCacheError | None = None
        self.fd = -1
        self._ranks = ranks
        self._settings = settings
        self._copies: dict[int, asyncio.Future[None]] = {}
        self._last_copy = 0
        threads = max(1, len(os.sched_getaffinity(0)) // settings.ranks)
        start = StartRank(
            model=settings.model, device=settings.device, dtype=settings.dtype, num_threads=threads,
            pool_bytes=settings.pool_bytes,
        )  # fmt: skip
        self.child = Child(ranks.poller, MODULE, self._on_frame, self._on_exit, {"OMP_NUM_THREADS": str(threads)})
        self.child.send(pack_frame(Kind.START_RANK, start, fds=[ingest.region.fd]))
        self.batcher = Batcher(self._send_run, settings.max_batch_patches)

    def _adopt_pool(self, fd: int) -> None:
        self.fd = fd
        self.memory = ReadOnlyRegion.attach(fd, SEALS_READERS)
        self.pool = Pool(self.pool_id, self.memory.nbytes, on_evict=self._ranks.on_evict)

    def copy(self, source: int, extent: Extent) -> asyncio.Future[None]:
        """Copy the bytes of `extent` from the ingest region. The future raises `RankLostError`."""
        self._last_copy += 1
        done = self._copies[self._last_copy] = asyncio.get_running_loop().create_future()
        copy = Copy(copy_id=self._last_copy, source=source, extent=extent.offset, nbytes=extent.nbytes)
        self.child.send(pack_frame(Kind.COPY, copy))
        return done

    def payload(self, extent: Extent) -> memoryview:
        """The extent's bytes, read only. The caller keeps the extent pinned meanwhile."""
        return self.memory.view(extent.offset, extent.nbytes).data

    def close_pool(self) -> None:
        """The rank is dead and its last lease has ended: give the memory back, if it had any."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            del self.memory

    def _send_run(self, run: Run) -> None:
        self.child.send(pack_frame(Kind.RUN, run))

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind == Kind.RANK_READY:
            (fd,) = take_descriptors(frame, 1)
            self._adopt_pool(fd)
            self._ranks.on_ready(self, parse(RankReady, frame))
            return
        close_all(frame.fds)
        if frame.kind == Kind.RAN:
            self.batcher.ran(parse(Ran, frame))
        elif frame.kind == Kind.COPIED:
            self._copies.pop(parse(Copied, frame).copy_id).set_result(None)
        elif frame.kind == Kind.START_FAILED:
            failed = parse(StartFailed, frame)
            self.failure = _failure(self._settings, failed)

    def _on_exit(self, reason: str) -> None:
        copies, self._copies = self._copies, {}
        self._ranks.on_exit(self, reason)
        self.batcher.lose()
        for done in copies.values():
            done.set_exception(RankLostError())


class Ranks:
    """All ranks. `on_added` and `on_lost` tell the coordinator of pools, `on_evict` of extents that left a pool."""

    def __init__(
        self,
        poller: Poller,
        settings: Settings,
        ingest: Ingest,
        on_added: Callable[[Rank], None],
        on_lost: Callable[[Rank], None],
        on_evict: Callable[[Extent], None],
    ) -> None:
        self.poller = poller
        self._settings = settings
        self._ingest = ingest
        self._on_added = on_added
        self._on_lost = on_lost
        self.on_evict = on_evict
        self._loop = asyncio.get_running_loop()
        self._slots: list[Rank | None] = [None] * settings.ranks
        self._incarnations = [0] * settings.ranks
        self._deaths_in_a_row = [0] * settings.ranks
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._stopping = False
        self.facts: ModelFacts | None = None
        self.num_restarts = 0

    @property
    def ready(self) -> list[Rank]:
        """Ranks that take work."""
        return [rank for rank in self._slots if rank is not None and rank.is_ready]

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks that are alive."""
        return [rank.child.pid for rank in self._slots if rank is not None]

    async def start(self) -> ModelFacts:
        """Start every rank and wait until all are warm.

        Raises:
            CheckpointError, ConfigError, SidecarError: a rank cannot start; the message says why.
        """
        for index in range(len(self._slots)):
            self._spawn(index)
        await self._started
        assert self.facts is not None, "a ready rank brings the facts"
        return self.facts

    async def stop(self, timeout_s: float) -> None:
        """End every rank."""
        self._stopping = True
        await asyncio.gather(*(rank.child.stop(timeout_s) for rank in self._slots if rank is not None))

    def _spawn(self, index: int) -> None:
        if self._stopping:
            return
        self._incarnations[index] += 1
        pool_id = self._incarnations[index] << 8 | index
        try:
            self._slots[index] = Rank(index, pool_id, self, self._settings, self._ingest)
        except OSError as error:
            self._restart(index, f"its process cannot be started: {error.strerror}")

    def on_ready(self, rank: Rank, ready: RankReady) -> None:
        """A rank is warm."""
        facts = _facts(self._settings, ready)
        self.facts = self.facts or facts
        if facts != self.facts:
            rank.failure = CheckpointError("the model on disk changed while the sidecar ran; restart the sidecar")
            rank.child.kill()
            return
        rank.cost = CostModel(*ready.cost)
        rank.is_ready = True
        self._deaths_in_a_row[rank.index] = 0
        self._on_added(rank)
        if len(self.ready) == len(self._slots) and not self._started.done():
            self._started.set_result(None)

    def on_exit(self, rank: Rank, reason: str) -> None:
        """A rank is dead: its pool has lost its writer; a new one is started."""
        self._slots[rank.index] = None
        if rank.is_ready:
            rank.is_ready = False
            self._on_lost(rank)
        else:
            rank.close_pool()
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
        self.num_restarts += 1
        self._loop.call_later(delay_s, self._spawn, index)


def _failure(settings: Settings, failed: StartFailed) -> MMCacheError:
    if failed.error == CheckpointError.__name__:
        return CheckpointError(f"model = {settings.model}: {failed.reason}")
    if failed.error == MemoryUnavailable.__name__:
        return ConfigError(f"pool_bytes = {settings.pool_bytes} for each of {settings.ranks} ranks: {failed.reason}")
    return SidecarError(f"a rank cannot start: {failed.reason}")


def _facts(settings: Settings, ready: RankReady) -> ModelFacts:
    return ModelFacts(
        model=settings.model,
        fingerprint=fingerprint(
            weights_digest=ready.weights_digest,
            model_config=ready.model_config_json,
            processor=ready.processor_json,
            decoding=settings.decoding,
            is_deterministic=settings.deterministic,
            dtype=settings.dtype,
            numerics_version=ready.numerics_version,
        ),
        dtype=settings.dtype,
        dim=ready.dim,
        numerics_version=ready.numerics_version,
        processor=ProcessorConfig(**json.loads(ready.processor_json)),
    )
