"""The queue for ranks: fair between clients, balanced between ranks, bound only when a rank can take it."""

from __future__ import annotations

from collections import Counter
from typing import cast

import pytest

from mmcache.errors import EncodeFailed
from mmcache.server.batcher import BatchFailedError, RankLostError, RecalledError
from mmcache.server.flows import BULK, INTERACTIVE, Flow
from mmcache.server.rank import Rank
from mmcache.server.retries import ALONE, Retries
from mmcache.server.scheduler import MAX_HINT_S, MIN_HINT_S, NoRoomError
from tests.mmcache.scheduling import BUDGET, Bench, SilentRank, on_loop, turn


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


def test_an_idle_rank_does_not_leave_work_to_one_that_is_late() -> None:
    """A batch that takes longer than predicted counts as nearly done, and no better than nothing to do."""

    async def test() -> None:
        bench = Bench(2)
        late = bench.put(0)  # predicted to take no time at all
        await turn()
        assert bench.batches() == [1, 0]
        job = bench.put(1)
        await turn()
        assert job.rank is cast("Rank", bench.ranks[1])
        assert not late.done.done()

    on_loop(test)


def test_two_in_flight_follow_each_other_closely() -> None:
    async def test() -> None:
        bench = Bench(1, max_in_flight=2)
        (rank,) = bench.ranks
        bench.put(50)  # seconds, as predicted: the next would be bound long before it can run
        await turn()
        late = bench.put(0)
        await turn()
        assert (rank.num_in_flight, late.rank) == (1, None)
        rank.answer()
        assert (rank.num_in_flight, len(rank.sent)) == (1, 2), "nothing is predicted to be left of it"
        bench.put(0)
        bench.put(0)
        await turn()
        assert rank.num_in_flight == 2
        bench.put(0)
        await turn()
        assert (rank.num_in_flight, len(bench.scheduler)) == (2, 1), "two at a time"
        rank.answer()
        rank.answer()
        rank.answer()
        assert rank.num_in_flight == 0
        assert not len(bench.scheduler)

    on_loop(test)


def test_a_failed_item_goes_elsewhere_if_it_can() -> None:
    async def test() -> None:
        bench = Bench(2)
        first, second = cast("list[Rank]", bench.ranks)
        again = bench.job(10, avoid=first, limit_patches=ALONE)
        bench.scheduler.put(again, Flow("client"))
        bench.put(10)
        await turn()
        assert again.rank is second
        assert bench.batches() == [1, 1]
        del bench.ranks[1]
        bench.ranks[0].answer()
        only = bench.job(10, avoid=first, limit_patches=ALONE)
        bench.scheduler.put(only, Flow("client"))
        await turn()
        assert only.rank is first, "there is no other"

    on_loop(test)


def test_what_failed_alone_is_tried_alone() -> None:
    async def test() -> None:
        bench = Bench(1)
        for _ in range(3):
            bench.scheduler.put(bench.job(1, limit_patches=ALONE), Flow("client"))
        bench.put(1)
        bench.put(1)
        await turn()
        sizes = []
        while bench.ranks[0].num_in_flight:
            sizes += bench.batches()
            bench.ranks[0].answer()
        assert sorted(sizes) == [1, 1, 1, 2]

    on_loop(test)


@pytest.mark.parametrize("most", [7, 20, 99])
def test_what_is_too_large_for_the_memory_is_halved_until_it_fits(most: int) -> None:
    """A rank that has memory for `most` patches only: every item is encoded in the end, and none counts a failure."""

    async def test() -> None:
        bench = Bench(1)
        (rank,) = bench.ranks
        retries = [Retries() for _ in range(20)]
        jobs = dict.fromkeys(range(20))
        for number in jobs:
            jobs[number] = bench.put(5)
        await turn()
        num_batches = 0
        while rank.num_in_flight:
            num_batches += 1
            rank.answer("memory" if 5 * len(rank.sent[-1].extents) > most else "")
            for number, job in list(jobs.items()):
                if job is None or not job.done.done():
                    continue
                if (error := job.done.exception()) is None:
                    del jobs[number]
                    continue
                assert isinstance(error, BatchFailedError)
                retries[number].failed(error, job.rank)
                again = jobs[number] = bench.job(
                    5, limit_patches=retries[number].limit_patches, avoid=retries[number].avoid
                )
                bench.scheduler.put(again, Flow("client"))
            await turn()
        assert jobs == {}
        assert num_batches <= 2 * 100 // (most // 2) + 2

    on_loop(test)


def test_an_item_is_given_up_after_its_second_failure() -> None:
    alone = BatchFailedError("no memory", is_memory=True, num_items=1, num_patches=70)
    retries = Retries()
    retries.failed(alone, None)
    with pytest.raises(EncodeFailed, match="have not the memory that it takes: no memory"):
        retries.failed(alone, None)
    retries = Retries()
    for _ in range(5):
        retries.failed(RankLostError(had_begun=False), None)
        retries.failed(BatchFailedError("no memory", is_memory=True, num_items=3, num_patches=70), None)
    assert retries.limit_patches == 35
    retries.failed(RankLostError(), None)
    assert retries.limit_patches == ALONE, "whoever killed the rank kills nobody else's work again"
    with pytest.raises(EncodeFailed, match="the rank failed: a fault"):
        retries.failed(BatchFailedError("a fault", is_memory=False, num_items=1, num_patches=4), None)


def test_a_job_that_is_bound_and_has_not_begun_is_given_up_too() -> None:
    async def test() -> None:
        bench = Bench(1)
        running = bench.put(BUDGET)
        await turn()
        rank = cast("Rank", bench.ranks[0])
        extent = bench.ranks[0].pool.reserve(64)
        assert extent is not None
        bound = bench.job(BUDGET).bind(rank, extent)
        bench.ranks[0].batcher.submit(bound)
        bench.scheduler.give_up(bound, KeyError("it left"))
        assert isinstance(bound.done.exception(), KeyError)
        assert len(bench.ranks[0].batcher) == 1
        assert bench.ranks[0].batcher.queued_s == running.cost_s

    on_loop(test)


def test_the_hint_says_when_there_is_room() -> None:
    async def test() -> None:
        bench = Bench(2)
        assert bench.scheduler.seconds_for(1000) == MIN_HINT_S
        for _ in range(200):
            bench.put(3)
        assert bench.scheduler.seconds_for(4) == pytest.approx(6)
        assert bench.scheduler.seconds_for(4000) == MAX_HINT_S

    on_loop(test)


def test_counters_follow_what_is_queued_and_begun() -> None:
    async def test() -> None:
        bench = Bench(1)
        bench.put(50)
        await turn()
        jobs = [bench.put(10, priority=BULK) for _ in range(3)]
        bench.put(20)
        bench.scheduler.move(jobs[0], Flow("other", INTERACTIVE))
        bench.scheduler.give_up(jobs[1], KeyError("it left"))
        counted = bench.scheduler.counters()
        assert counted == {"interactive": 2, "bulk": 1, "seconds": 40.0, "announced_patches": 0}
        bench.ranks[0].answer()
        assert bench.scheduler.counters() == {"interactive": 0, "bulk": 0, "seconds": 0.0, "announced_patches": 0}
        batches = bench.scheduler.batch_counters()
        assert {name: batches[name] for name in ("begun", "items", "patches", "fill", "fill_waits")} == {
            "begun": 2, "items": 4, "patches": 90, "fill": 0.45, "fill_waits": 0,
        }  # fmt: skip
        waits = batches["waits"]
        assert isinstance(waits, dict)
        assert [waits[name]["items"] for name in ("interactive", "bulk")] == [3, 1]

    on_loop(test)
