"""Nobody waits for a stranger: what is next in the queue for ranks, whatever others have queued."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from mmcache.server.flight import Flight
from mmcache.server.flows import BULK, INTERACTIVE, Flow, flow_of
from tests.mmcache.scheduling import BUDGET, Bench, on_loop, turn


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize("patches", [1, 10, 60])
def test_one_item_of_another_client_is_in_the_next_microbatch(num_ranks: int, patches: int) -> None:
    async def test() -> None:
        bench = Bench(num_ranks)
        for _ in range(500):
            bench.put(10, "many", priority=BULK)
        await turn()
        assert all(rank.num_in_flight for rank in bench.ranks)
        small = bench.put(patches, "one")
        await turn()
        assert small.rank is None, "every rank is busy"
        bench.ranks[-1].answer()
        assert small.rank is not None, "whichever rank is free first has it"

    on_loop(test)


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize(
    ("priorities", "share"), [((INTERACTIVE, INTERACTIVE), 1.0), ((BULK, BULK), 1.0), ((INTERACTIVE, BULK), 8.0)]
)
def test_ranks_are_shared_by_weight(num_ranks: int, priorities: tuple[int, int], share: float) -> None:
    async def test() -> None:
        bench = Bench(num_ranks)
        jobs = {
            client: [bench.put(7, client, priority=code) for _ in range(2000)]
            for client, code in zip("ab", priorities, strict=True)
        }
        await turn()
        for turn_number in range(120):
            bench.ranks[turn_number % num_ranks].answer()
        begun = [sum(job.rank is not None for job in jobs[client]) for client in "ab"]
        assert begun[0] / begun[1] == pytest.approx(share, rel=0.1)

    on_loop(test)


def test_who_is_next_is_not_passed_twice() -> None:
    """A cheap item that falls to a busy rank, by its cost, every time that a rank is free."""

    async def test() -> None:
        bench = Bench(2)
        bench.put(90)
        bench.put(80)
        await turn()
        cheap = bench.put(1, "a")
        num_answered = 0
        while cheap.rank is None:
            bench.put(95, "b")
            bench.put(95, "b")
            bench.ranks[num_answered % 2].answer()
            num_answered += 1
        assert num_answered <= 2

    on_loop(test)


def test_an_item_that_somebody_waits_for_moves_up() -> None:
    async def test() -> None:
        bench = Bench(1)
        jobs = [bench.put(BUDGET, "many", priority=BULK) for _ in range(50)]
        await turn()
        bench.scheduler.move(jobs[-1], Flow("one", INTERACTIVE))
        bench.ranks[0].answer()
        assert jobs[-1].rank is not None
        bench.scheduler.move(jobs[-1], Flow("many", BULK))  # a rank has it
        bench.ranks[0].answer()
        assert jobs[-1].done.done()

    on_loop(test)


@dataclass(eq=False)
class Waiting:
    """As much of a request as a flight needs to know whose it is."""

    connection: str
    priority: int
    open: dict[int, Flight] = field(default_factory=dict)


def test_a_flight_is_theirs_who_wait_most_urgently() -> None:
    flight = Flight(b"key", b"")
    seen: list[Flow | None] = []
    flight.on_change = lambda: seen.append(flow_of(flight) if flight.waiters else None)
    waiting: Any = Waiting
    bulk, other, urgent = waiting("a", BULK), waiting("b", BULK), waiting("c", INTERACTIVE)
    flight.join(bulk, 0)
    flight.join(other, 0)
    assert (seen, flow_of(flight)) == ([], Flow("a", BULK))
    flight.join(urgent, 0)
    flight.leave(bulk, 0)
    flight.leave(urgent, 0)
    flight.leave(other, 0)
    assert seen == [Flow("c", INTERACTIVE), Flow("c", INTERACTIVE), Flow("b", BULK), None]
