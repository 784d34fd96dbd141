"""The coordinator's side of one rank: its process, its pool, and what it was asked to do."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import TYPE_CHECKING, Any

from encoder.sharding import CostModel
from ipc.pool import Extent, Pool
from mmcache.config import Settings
from mmcache.errors import EncodeFailed, MMCacheError, SidecarError
from mmcache.framing import Frame, Kind, close_all, pack_frame, parse
from mmcache.server.batcher import Batcher, RankLostError
from mmcache.server.children import Worker
from mmcache.server.costs import Predictor
from mmcache.server.facts import ModelFacts, facts_of, load_failure, start_failure
from mmcache.server.ingest import Ingest
from mmcache.server.limits import Limits
from mmcache.server.messages import (
    Compare,
    Compared,
    Copied,
    Copy,
    CopyOut,
    Load,
    Loaded,
    MapRegion,
    ModelReport,
    Ran,
    RankReady,
    Run,
    StartFailed,
    StartRank,
    Swap,
    Unload,
    UnmapRegion,
)
from mmcache.server.pool_memory import PoolMemory
from mmcache.server.watchdog import Watchdog
from mmcache.transport import take_descriptors

if TYPE_CHECKING:
    from mmcache.server.ranks import Ranks
    from mmcache.server.slots import Death

MODULE = "mmcache.server.rank_process"
START_TIMEOUT_S = 600.0
"""What a rank loads its model from may never answer."""
LOADING, ENCODING, COPYING = "loading", "encoding", "copying"
"""What its process does one after the other, each in a thread of its own."""
WORK = (Kind.RAN, Kind.COPIED, Kind.COMPARED)


class Rank:
    """One living rank: its process, its pool and its queue. A restart makes a new one.

    Attributes:
        facts: the model that its process encodes with; None before it is warm.
        next: facts and costs of the model that its process has loaded beside that one, if any.
        model: what its process was told to load.
        acceleration: what it uses of a GPU, as of its latest answer.
        is_ready: whether it takes work: it is warm, and its model is the one that is served.
        is_stale: it is warm, but the files of its model had changed when it read them.
        is_given_up: it takes no work any more and is about to die.
        has_worked: whether it has answered anything that it was asked to do.
        failure: why it is lost, if the process itself does not say it.
        death: of what kind that is.
        memory: of its pool; None before it is warm, unless one was left to it.
        has_lost_pool: whether it could not use what was left to it.
    """

    def __init__(
        self, index: int, pool_id: int, ranks: Ranks, settings: Settings, ingest: Ingest, left: PoolMemory | None
    ) -> None:
        """Start the process. `pool_id`: of the pool that it makes, if none was `left` by the rank before it."""
        self.index = index
        self._pool_id = pool_id
        self.memory = left
        self.has_lost_pool = False
        self.cost = Predictor(CostModel(0.0, 0.0, 0.0))
        self.facts: ModelFacts | None = None
        self.next: tuple[ModelFacts, Predictor] | None = None
        self._next_patches = 0
        self.acceleration: dict[str, str | int] = {}
        self.is_ready = self.is_stale = self.is_given_up = self.has_worked = False
        self.failure: MMCacheError | None = None
        self.death: Death | None = None
        self._ranks = ranks
        self._settings = settings
        self.model = ranks.model
        self._loading: tuple[str, asyncio.Future[None]] | None = None
        self._copies: dict[int, asyncio.Future[bool]] = {}
        self._last_job = 0
        self._mapped: set[int] = set()
        self._compares: dict[int, asyncio.Future[Compared]] = {}
        threads = max(1, len(os.sched_getaffinity(0)) // settings.ranks)
        start = StartRank(
            model=self.model, device=ranks.device_of(index), dtype=settings.dtype, num_threads=threads,
            num_sharing=ranks.num_sharing(index),
            pool_bytes=left.nbytes if left else settings.pool_bytes, has_pool=left is not None, seed=ranks.seed,
            deterministic=settings.deterministic, known=ranks.digests.known, costs=ranks.calibrations.known,
            attention=settings.attention, graph_bytes=_graph_bytes(settings), makes_digests=settings.verify_sample > 0,
            device_bytes=settings.device_bytes, has_high_priority=settings.stream_priority == "high",
        )  # fmt: skip
        environ = {"OMP_NUM_THREADS": str(threads)}
        if settings.deterministic:
            environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        self.child: Worker = ranks.spawn(ranks.poller, MODULE, self._on_frame, self._on_exit, environ)
        self.child.send(pack_frame(Kind.START_RANK, start, fds=[ingest.region.fd, *([left.fd] if left else [])]))
        self.batcher = Batcher(
            self._send_run, settings.max_batch_patches, settings.max_patches_per_second,
            max_in_flight=2 if settings.device == "cuda" else 1,
        )  # fmt: skip
        self._limits = Limits(settings.encode_timeout_s)
        self._watchdog = Watchdog(self._on_hang)
        self._watchdog.asked(LOADING, 0, "load its model and become warm", lambda: START_TIMEOUT_S)

    @property
    def max_patches(self) -> int:
        """Most patches of a microbatch with more than one item: as set, or what fits into its memory."""
        return self.batcher.max_patches

    @property
    def pool(self) -> Pool:
        """Its pool. It is warm."""
        assert self.memory is not None, "a rank that is warm has a pool"
        return self.memory.pool

    def load(self, model: str) -> asyncio.Future[None]:
        """Load a model beside the one in use, into `next`.

        The future raises `ConfigError`, `CheckpointError` or `SidecarError`: why it cannot be loaded.
        """
        assert self._loading is None, "one model is loaded at a time"
        done = asyncio.get_running_loop().create_future()
        self._loading = (model, done)
        known, costs = self._ranks.digests.known, self._ranks.calibrations.known
        self.child.send(pack_frame(Kind.LOAD, Load(model=model, known=known, costs=costs)))
        return done

    def swap(self) -> None:
        """Batches that are sent from now on are for the model in `next`."""
        assert self.next is not None, "it was loaded"
        (self.facts, self.cost), self.next = self.next, None
        self._bound(self._next_patches)
        self.child.send(pack_frame(Kind.SWAP, Swap()))

    def unload(self) -> None:
        """Drop the model in `next`, if there is one."""
        if self.next is not None:
            self.next = None
            self.child.send(pack_frame(Kind.UNLOAD, Unload()))

    def copy(self, source: int, extent: Extent, *, guard: str = "") -> asyncio.Future[bool]:
        """Copy the bytes of `extent` from the ingest region. The future raises `RankLostError`.

        It is False if the values are of the dtype `guard`, and NaN or Inf is among them.
        """
        self._last_job += 1
        done = self._copies[self._last_job] = asyncio.get_running_loop().create_future()
        values = {"copy_id": self._last_job, "source": source, "extent": extent.offset, "nbytes": extent.nbytes}
        self.child.send(pack_frame(Kind.COPY, Copy.model_validate({**values, "guard": guard})))
        self._watch_copy(self._last_job, extent)
        return done

    def compare(self, cached: Extent, fresh: Extent, num_tokens: int) -> asyncio.Future[Compared]:
        """Compare two embeddings of one item. The caller keeps both meanwhile.

        The future raises `RankLostError`, or `EncodeFailed` if they cannot be compared.
        """
        self._last_job += 1
        done = self._compares[self._last_job] = asyncio.get_running_loop().create_future()
        compare = Compare(
            compare_id=self._last_job, cached=cached.offset, fresh=fresh.offset, num_tokens=num_tokens,
            digest=cached.digest,
        )  # fmt: skip
        self.child.send(pack_frame(Kind.COMPARE, compare))
        self._watchdog.asked(ENCODING, -self._last_job, "compare two embeddings", self._limits.moved(2 * cached.nbytes))
        return done

    def copy_out(self, extent: Extent, target: int) -> asyncio.Future[bool]:
        """Copy device memory into the ingest region. The caller keeps the extent pinned meanwhile.

        The future raises `RankLostError`.
        """
        self._last_job += 1
        done = self._copies[self._last_job] = asyncio.get_running_loop().create_future()
        copy = CopyOut(copy_id=self._last_job, target=target, extent=extent.offset, nbytes=extent.nbytes)
        self.child.send(pack_frame(Kind.COPY_OUT, copy))
        self._watch_copy(self._last_job, extent)
        return done

    def unmap(self, region: int) -> None:
        """A staging region is gone."""
        if region in self._mapped:
            self._mapped.discard(region)
            self.child.send(pack_frame(Kind.UNMAP_REGION, UnmapRegion(region=region)))

    def _send_run(self, run: Run) -> None:
        for region in {claim.region for claim in run.claims.values()} - self._mapped:
            if (fd := self._ranks.region_fd(region)) is not None:  # else its client is dead: the read fails
                self.child.send(pack_frame(Kind.MAP_REGION, MapRegion(region=region), fds=[fd]))
                self._mapped.add(region)
        self.child.send(pack_frame(Kind.RUN, run))
        assert self.facts is not None, "it is warm"
        merge = self.facts.processor.merge_size
        limit_s = partial(self._limits.batch, self.cost, merge, run.num_tokens, run.num_frames)
        self._watchdog.asked(ENCODING, run.batch_id, f"encode a batch of {len(run.extents)}", limit_s)

    def _watch_copy(self, job: int, extent: Extent) -> None:
        self._watchdog.asked(COPYING, job, f"copy {extent.nbytes} bytes", self._limits.moved(extent.nbytes))

    def _on_hang(self, reason: str) -> None:
        self._ranks.give_up(self, SidecarError(f"{reason}; it was killed"), "hung")

    def _bound(self, max_patches: int) -> None:
        """So many patches fit into its memory, as it says; 0: nothing limits them."""
        self.batcher.max_patches = min(
            self._settings.max_batch_patches, max_patches or self._settings.max_batch_patches
        )

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind == Kind.RANK_READY:
            ready = parse(RankReady, frame)
            fds = take_descriptors(frame, 0 if self.memory else 1)
            if self.memory is None:
                self.memory = PoolMemory(self._pool_id, fds[0], ready.pool_bytes, ready.device, self._ranks.on_evict)
            self.facts, self.cost = self._described(self.model, ready)
            self._bound(ready.max_patches)
            self.acceleration = ready.acceleration
            self._watchdog.answered(LOADING, 0)
            self._ranks.on_ready(self)
            return
        close_all(frame.fds)
        self.has_worked |= frame.kind in WORK
        if frame.kind == Kind.RAN:
            self._on_ran(parse(Ran, frame))
        elif frame.kind == Kind.COPIED:
            copied = parse(Copied, frame)
            self._watchdog.answered(COPYING, copied.copy_id)
            self._copies.pop(copied.copy_id).set_result(copied.finite)
        elif frame.kind == Kind.COMPARED:
            compared = parse(Compared, frame)
            self._watchdog.answered(ENCODING, -compared.compare_id)
            done = self._compares.pop(compared.compare_id)
            if compared.error:
                done.set_exception(EncodeFailed(f"the rank failed: {compared.error}"))
            else:
                done.set_result(compared)
        elif frame.kind == Kind.START_FAILED:
            failed = parse(StartFailed, frame)
            self.has_lost_pool = failed.lost_pool
            self.failure = start_failure(self._settings, self.model, failed)
        elif frame.kind == Kind.LOADED:
            self._on_loaded(parse(Loaded, frame))

    def _on_ran(self, ran: Ran) -> None:
        self._watchdog.answered(ENCODING, ran.batch_id)
        self._bound(ran.max_patches)
        self.acceleration = ran.acceleration or self.acceleration
        if ran.failure == "memory":
            self._ranks.on_out_of_memory(self)
        self.batcher.ran(ran)

    def _on_loaded(self, loaded: Loaded) -> None:
        assert self._loading is not None, "it was asked to load"
        (model, done), self._loading = self._loading, None
        if done.cancelled():  # the sidecar stops
            return
        if loaded.report is None:
            done.set_exception(load_failure(model, loaded))
        else:
            self.next, self._next_patches = self._described(model, loaded.report), loaded.report.max_patches
            done.set_result(None)

    def _described(self, model: str, report: ModelReport) -> tuple[ModelFacts, Predictor]:
        if report.identity:
            self._ranks.digests.add(report.identity, report.weights_digest.hex())
        self._ranks.calibrations.add(report.cost_identity, report.cost)
        return facts_of(self._settings, model, report), Predictor(CostModel.from_numbers(report.cost))

    def _on_exit(self, reason: str) -> None:
        self._watchdog.stop()
        waiting: list[asyncio.Future[Any]] = [*self._copies.values(), *self._compares.values()]
        self._copies, self._compares = {}, {}
        self._ranks.on_exit(self, reason)
        self.batcher.lose()
        for done in waiting:
            done.set_exception(RankLostError())
        if self._loading is not None:
            (model, done), self._loading = self._loading, None
            why = f"rank {self.index} died while it loaded it beside the one that is served"
            if not done.cancelled():
                done.set_exception(SidecarError(f"model = {model}: {why}: {self.failure or reason}"))


def _graph_bytes(settings: Settings) -> int:
    """Of a bounded device, graphs leave three quarters to what has none."""
    return min(settings.graph_bytes, settings.device_bytes // 4) if settings.device_bytes else settings.graph_bytes
