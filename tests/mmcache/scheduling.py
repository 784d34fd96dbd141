"""A scheduler over ranks whose processes are the test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from encoder.sharding import CostModel
from ipc.pool import Pool
from mmcache.server.batcher import Batcher
from mmcache.server.costs import Predictor
from mmcache.server.decoders import Pixels
from mmcache.server.flows import INTERACTIVE, Flow
from mmcache.server.ingest import IngestSlice
from mmcache.server.messages import Ran, Run
from mmcache.server.microbatch import EncodeJob
from mmcache.server.rank import Rank
from mmcache.server.scheduler import Scheduler

BUDGET = 100


@dataclass(eq=False)
class SilentRank:
    """A rank whose process is the test: what it is sent is kept, and answered when the test says so."""

    max_in_flight: int = 1
    pool: Pool = field(default_factory=lambda: Pool(1, 1 << 20, on_evict=lambda _: None))
    sent: list[Run] = field(default_factory=list)
    num_answered: int = 0

    def __post_init__(self) -> None:
        self.batcher = Batcher(self.sent.append, BUDGET, max_in_flight=self.max_in_flight)
        self.cost = Predictor(CostModel(0.0, 0.0, 1.0))

    @property
    def num_in_flight(self) -> int:
        return len(self.sent) - self.num_answered

    def answer(self, failure: Literal["", "memory", "error"] = "") -> None:
        """Of the first microbatch in flight."""
        run = self.sent[self.num_answered]
        self.num_answered += 1
        finite = [not failure] * len(run.extents)
        ran = Ran(batch_id=run.batch_id, seconds=0.0, finite=finite, failure=failure, error=failure and "it is so")
        self.batcher.ran(ran)


class Bench:
    """Ranks and a scheduler."""

    def __init__(self, num_ranks: int, max_in_flight: int = 1, fill_wait_s: float = 0.0) -> None:
        self.ranks = [SilentRank(max_in_flight) for _ in range(num_ranks)]
        self.is_room_short = False
        ready = lambda: cast("list[Rank]", self.ranks)  # noqa: E731
        self.scheduler = Scheduler(ready, lambda: self.is_room_short, BUDGET, fill_wait_s)
        for rank in self.ranks:
            self.scheduler.serve(cast("Rank", rank))

    def job(self, patches: int, nbytes: int = 256, **more: Any) -> EncodeJob:
        return EncodeJob(Pixels(IngestSlice(0, 12), 1, 2, 2), patches, 1, nbytes, float(patches), **more)

    def put(self, patches: int, client: str = "client", nbytes: int = 256, priority: int = INTERACTIVE) -> EncodeJob:
        job = self.job(patches, nbytes)
        self.scheduler.put(job, Flow(client, priority))
        return job

    def batches(self) -> list[int]:
        """How many items each rank has been sent last."""
        return [len(rank.sent[-1].extents) if rank.sent else 0 for rank in self.ranks]


def on_loop(test: Callable[[], Awaitable[Any]]) -> None:
    async def run() -> None:
        await test()

    asyncio.run(run())


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)
