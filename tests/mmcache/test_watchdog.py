"""What counts as progress, and what as a hang, on a clock of the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from encoder.sharding import CostModel
from mmcache.server.limits import BASE_S, FACTOR, Limits
from mmcache.server.watchdog import TICK_S, Watchdog


class Loop(asyncio.SelectorEventLoop):
    """Its time is what the test says; timers come when it has passed."""

    now_s = 100.0

    def time(self) -> float:
        return self.now_s

    async def passes(self, seconds: float, at_once: bool = False) -> None:
        """Let time pass, tick by tick; or at once, as when the process stood still."""
        until = self.now_s + seconds
        while self.now_s < until:
            self.now_s = until if at_once else min(until, self.now_s + TICK_S)
            await asyncio.sleep(0)
            await asyncio.sleep(0)


def watched(test: Callable[[Loop, Watchdog, list[str]], object]) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Loop)
        hangs: list[str] = []
        await test(loop, Watchdog(hangs.append), hangs)  # type: ignore[misc]

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(run())


def test_what_is_not_answered_in_time_is_a_hang_and_told_once() -> None:
    async def test(loop: Loop, dog: Watchdog, hangs: list[str]) -> None:
        dog.asked("encoding", 1, "encode a batch of 3", lambda: 5.0)
        await loop.passes(5.0)
        assert hangs == [], "never early"
        await loop.passes(4 * TICK_S)
        assert hangs == ["it did not encode a batch of 3 within 5 s"]
        dog.asked("encoding", 2, "encode", lambda: 1.0)
        await loop.passes(10.0)
        assert len(hangs) == 1, "it is being killed"

    watched(test)


def test_every_answer_gives_the_next_its_whole_time() -> None:
    async def test(loop: Loop, dog: Watchdog, hangs: list[str]) -> None:
        for job in range(20):
            dog.asked("copying", job, f"copy {job}", lambda: 5.0)
        for job in range(19):
            await loop.passes(4.5)
            dog.answered("copying", job)
        await loop.passes(4.5)
        assert hangs == []
        await loop.passes(6 * TICK_S)
        assert hangs == ["it did not copy 19 within 5 s"]

    watched(test)


def test_progress_in_one_lane_is_none_in_another() -> None:
    async def test(loop: Loop, dog: Watchdog, hangs: list[str]) -> None:
        dog.asked("encoding", 1, "encode", lambda: 10.0)
        for job in range(12):
            dog.asked("copying", job, "copy", lambda: 10.0)
            await loop.passes(1.0)
            dog.answered("copying", job)
        assert hangs == ["it did not encode within 10 s"]

    watched(test)


def test_time_without_work_counts_not() -> None:
    async def test(loop: Loop, dog: Watchdog, hangs: list[str]) -> None:
        dog.asked("encoding", 1, "encode", lambda: 5.0)
        dog.answered("encoding", 1)
        await loop.passes(100.0)
        dog.asked("encoding", 2, "encode", lambda: 5.0)
        await loop.passes(4.5)
        assert hangs == []

    watched(test)


def test_time_in_which_this_process_stood_still_counts_not() -> None:
    async def test(loop: Loop, dog: Watchdog, hangs: list[str]) -> None:
        dog.asked("encoding", 1, "encode", lambda: 5.0)
        await loop.passes(3.0)
        await loop.passes(3600.0, at_once=True)
        assert hangs == []
        await loop.passes(6.0)
        assert len(hangs) == 1

    watched(test)


def test_nothing_is_told_of_a_process_that_is_dead() -> None:
    async def test(loop: Loop, dog: Watchdog, hangs: list[str]) -> None:
        dog.asked("encoding", 1, "encode", lambda: 5.0)
        dog.stop()
        await loop.passes(20.0)
        assert hangs == []

    watched(test)


def test_limits_follow_what_is_predicted() -> None:
    cost = CostModel(0.0, 1.0, 0.0)
    auto, fixed = Limits(0.0), Limits(7.0)
    assert auto.batch(cost, 2, [2, 3], [0, 4]) == pytest.approx(BASE_S + FACTOR * 4 * (2 + 3 * 4))
    assert auto.moved(10**9)() > auto.moved(0)() == BASE_S
    assert fixed.batch(cost, 2, [1000], [0]) == fixed.moved(10**9)() == 7.0
