"""Waiting to fill a microbatch: only after another, only for what is announced, and no longer than it may."""

from __future__ import annotations

import asyncio

from tests.mmcache.scheduling import BUDGET, Bench, on_loop, turn

LONG_S = 3600.0


async def finished_with_one_ready(bench: Bench) -> None:
    """The rank has finished, one item of 10 patches is ready."""
    bench.put(BUDGET)
    await turn()
    bench.put(10)
    bench.ranks[0].answer()


def test_an_idle_rank_waits_for_nobody() -> None:
    async def test() -> None:
        bench = Bench(1, fill_wait_s=LONG_S)
        bench.scheduler.announce().sized(50)
        bench.put(10)
        await turn()
        assert bench.ranks[0].num_in_flight == 1
        bench.ranks[0].answer()
        bench.put(10)  # it was idle when this came
        await turn()
        assert bench.ranks[0].num_in_flight == 1

    on_loop(test)


def test_without_announcements_nobody_waits() -> None:
    async def test() -> None:
        bench = Bench(1, fill_wait_s=LONG_S)
        bench.scheduler.announce()  # its header is not read yet
        await finished_with_one_ready(bench)
        assert bench.ranks[0].num_in_flight == 1

    on_loop(test)


def test_what_is_announced_is_waited_for_and_goes_along() -> None:
    async def test() -> None:
        bench = Bench(1, fill_wait_s=LONG_S)
        announced = bench.scheduler.announce()
        announced.sized(20)
        await finished_with_one_ready(bench)
        assert bench.ranks[0].num_in_flight == 0
        bench.put(5)
        await turn()
        assert bench.ranks[0].num_in_flight == 0, "there is more to come"
        announced.withdraw()
        bench.put(20)
        await turn()
        assert bench.batches() == [3]
        assert bench.scheduler.batch_counters()["fill_waits"] == 1

    on_loop(test)


def test_a_full_microbatch_does_not_wait() -> None:
    async def test() -> None:
        bench = Bench(1, fill_wait_s=LONG_S)
        bench.scheduler.announce().sized(20)
        await finished_with_one_ready(bench)
        bench.put(BUDGET - 10)
        await turn()
        assert bench.batches() == [2]

    on_loop(test)


def test_what_fails_to_come_is_not_waited_for() -> None:
    async def test() -> None:
        bench = Bench(1, fill_wait_s=LONG_S)
        announced = bench.scheduler.announce()
        announced.sized(20)
        await finished_with_one_ready(bench)
        announced.withdraw()
        announced.withdraw()
        await turn()
        assert bench.ranks[0].num_in_flight == 1
        assert bench.scheduler.counters()["announced_patches"] == 0

    on_loop(test)


def test_what_was_to_be_filled_leaves() -> None:
    async def test() -> None:
        bench = Bench(1, fill_wait_s=LONG_S)
        bench.scheduler.announce().sized(20)
        bench.put(BUDGET)
        await turn()
        gone = bench.put(10)
        bench.ranks[0].answer()
        bench.scheduler.give_up(gone, KeyError("it left"))
        next_one = bench.put(10)
        await turn()
        assert isinstance(gone.done.exception(), KeyError)
        assert next_one.rank is None, "the wait that has begun goes on"

    on_loop(test)


def test_the_wait_ends() -> None:
    async def test() -> None:
        bench = Bench(1, fill_wait_s=0.002)
        bench.scheduler.announce().sized(20)
        await finished_with_one_ready(bench)
        assert bench.ranks[0].num_in_flight == 0
        for _ in range(20_000):
            if bench.ranks[0].num_in_flight:
                break
            await asyncio.sleep(0.001)
        assert bench.batches() == [1]

    on_loop(test)


def test_each_rank_waits_for_its_part() -> None:
    """With ten patches ready and twenty announced for two ranks, fifteen fill one of them."""

    async def test() -> None:
        bench = Bench(2, fill_wait_s=LONG_S)
        bench.scheduler.announce().sized(20)
        bench.put(BUDGET)
        bench.put(BUDGET)
        await turn()
        bench.put(10)
        bench.ranks[0].answer()
        assert bench.ranks[0].num_in_flight == 0
        bench.put(40)
        await turn()
        assert bench.ranks[0].num_in_flight == 1

    on_loop(test)
