"""The queue for ranks: fair between clients, balanced between ranks, bound only when a rank can take it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from ipc.pool import Pool
from mmcache.server.batcher import Batcher, RankLostError, RecalledError
from mmcache.server.decoders import Pixels
from mmcache.server.flows import Flow
from mmcache.server.ingest import IngestSlice
from mmcache.server.messages import Ran, Run
from mmcache.server.microbatch import EncodeJob
from mmcache.server.rank import Rank
from mmcache.server.scheduler import NoRoomError, Scheduler

BUDGET = 100


@dataclass(eq=False)
class SilentRank:
    """A rank whose process is the test: what it is sent is kept, and answered when the test says so."""

    pool: Pool = field(default_factory=lambda: Pool(1, 1 << 20, on_evict=lambda _: None))
    sent: list[Run] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.batcher = Batcher(self.sent.append, BUDGET)

    def answer(self) -> None:
        run = self.sent[-1]
        self.batcher.ran(Ran(batch_id=run.batch_id, seconds=0.0, finite=[True] * len(run.extents)))


class Bench:
    """Ranks and a scheduler."""

    def __init__(self, num_ranks: int) -> None:
        self.ranks = [SilentRank() for _ in range(num_ranks)]
        self.is_room_short = False
        self.scheduler = Scheduler(lambda: cast("list[Rank]", self.ranks), lambda: self.is_room_short, BUDGET)
        for rank in self.ranks:
            self.scheduler.serve(cast("Rank", rank))

    def put(self, patches: int, client: str = "client", nbytes: int = 256) -> EncodeJob:
        job = EncodeJob(Pixels(IngestSlice(0, 12), 1, 2, 2), patches, 1, nbytes, float(patches))
        self.scheduler.put(job, Flow(client))
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


def test_an_idle_rank_begins_at_once() -> None:
    async def test() -> None:
        bench = Bench(1)
        job = bench.put(10)
        await turn()
        assert bench.batches() == [1]
        assert job.rank is cast("Rank", bench.ranks[0])
        bench.ranks[0].answer()
        assert await job.done == 0.0

    on_loop(test)


def test_few_small_items_are_spread_over_idle_ranks() -> None:
    async def test() -> None:
        bench = Bench(4)
        for _ in range(8):
            bench.put(10)
        await turn()
        assert bench.batches() == [2, 2, 2, 2]

    on_loop(test)


def test_longest_first_balances_unequal_items() -> None:
    async def test() -> None:
        bench = Bench(2)
        jobs = [bench.put(patches) for patches in (20, 30, 40, 50)]
        await turn()
        loads = Counter({id(job.rank): 0 for job in jobs})
        for job in jobs:
            loads[id(job.rank)] += job.num_patches
        assert sorted(loads.values()) == [70, 70]

    on_loop(test)


def test_what_falls_to_a_busy_rank_is_not_bound() -> None:
    async def test() -> None:
        bench = Bench(2)
        long = bench.put(90)
        await turn()
        assert bench.batches() == [1, 0]
        jobs = [bench.put(30) for _ in range(5)]  # the other would be done with 90 when the first is
        await turn()
        assert bench.batches() == [1, 3]
        assert sum(job.rank is None for job in jobs) == 2
        bench.ranks[1].answer()  # it was faster than predicted: nothing was promised to the first
        assert all(job.rank is not None for job in jobs)
        assert long.rank is not jobs[-1].rank

    on_loop(test)


def test_a_microbatch_stays_within_the_budget_and_a_larger_item_runs_alone() -> None:
    async def test() -> None:
        bench = Bench(1)
        for patches in (40, 40, 40, 250, 10):
            bench.put(patches)
        await turn()
        sizes = [bench.batches()[0]]
        while len(bench.scheduler):
            bench.ranks[0].answer()
            sizes.append(bench.batches()[0])
        assert sum(sizes) == 5
        assert 1 in sizes, "the one above the budget was alone"
        assert all(size <= 3 for size in sizes)

    on_loop(test)


def test_one_item_of_another_client_is_in_the_next_microbatch() -> None:
    async def test() -> None:
        bench = Bench(1)
        bulk = [bench.put(10, "bulk") for _ in range(500)]
        await turn()
        small = bench.put(10, "small")
        await turn()
        assert small.rank is None
        bench.ranks[0].answer()
        assert small.rank is not None
        assert sum(job.rank is not None for job in bulk) == 19

    on_loop(test)


def test_who_leaves_makes_room_for_others() -> None:
    async def test() -> None:
        bench = Bench(1)
        first = bench.put(100)
        await turn()
        gone, stays = bench.put(90), bench.put(60)
        bench.scheduler.give_up(gone, KeyError("it left"))
        bench.scheduler.give_up(first, KeyError("a rank has it"))
        with pytest.raises(KeyError, match="it left"):
            await gone.done
        bench.ranks[0].answer()
        assert await first.done == 0.0
        assert stays.rank is not None
        assert gone.rank is None

    on_loop(test)


def test_without_room_a_job_queues_for_it() -> None:
    async def test() -> None:
        bench = Bench(1)
        huge, small = bench.put(10, nbytes=2 << 20), bench.put(10)
        await turn()
        assert isinstance(huge.done.exception(), NoRoomError)
        assert small.rank is not None
        bench.is_room_short = True
        late = bench.put(10)
        bench.ranks[0].answer()
        assert isinstance(late.done.exception(), NoRoomError), "nobody passes those who wait for room"
        assert late.extent is None

    on_loop(test)


def test_a_recall_ends_what_is_queued_and_a_death_what_is_bound() -> None:
    async def test() -> None:
        bench = Bench(1)
        running = bench.put(100)
        await turn()
        queued = bench.put(10)
        bench.scheduler.recall()
        assert isinstance(queued.done.exception(), RecalledError)
        waiting = bench.put(10)
        (dead,) = bench.ranks
        bench.ranks.clear()
        dead.batcher.lose()
        assert isinstance(running.done.exception(), RankLostError)
        assert waiting.rank is None, "it waits for a rank that lives"
        bench.ranks.append(SilentRank())
        bench.scheduler.serve(cast("Rank", bench.ranks[0]))
        await turn()
        assert waiting.rank is cast("Rank", bench.ranks[0])

    on_loop(test)
