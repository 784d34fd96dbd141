"""Fair queueing: shares by weight, no credit for idleness, and no wait behind what a stranger has queued."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcache.server.fair_queue import MAX_IDLE_FLOWS, MAX_STALE, FairQueue, Ticket


def served(queue: FairQueue[str], number: int) -> list[str]:
    """Take that many, each when it is due."""
    return [queue.take(next(queue.ahead())) for _ in range(number)]


def test_one_flow_is_served_in_order() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in "abcdef":
        queue.put(item, "flow", 1.0, 3.0)
    assert "".join(served(queue, 6)) == "abcdef"
    assert len(queue) == 0
    assert next(queue.ahead(), None) is None


def test_one_item_is_not_stuck_behind_five_hundred() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(500):
        queue.put(f"bulk {number}", "bulk", 1.0, 1.0)
    served(queue, 20)
    queue.put("small", "other", 1.0, 1.0)
    assert "small" in served(queue, 2)


@pytest.mark.parametrize(("weights", "costs"), [((1, 1), (1, 1)), ((8, 1), (1, 1)), ((1, 1), (1, 5)), ((3, 1), (2, 7))])
def test_service_is_shared_by_weight(weights: tuple[float, float], costs: tuple[float, float]) -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(2000):
        for flow, weight, cost in zip("ab", weights, costs, strict=True):
            queue.put(flow, flow, weight, cost)
    taken = Counter(served(queue, 1000))
    service = [taken[flow] * cost for flow, cost in zip("ab", costs, strict=True)]
    assert service[0] / service[1] == pytest.approx(weights[0] / weights[1], rel=0.05)


def test_idleness_is_no_credit() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.put("early", "idler", 1.0, 1.0)
    served(queue, 1)
    for _ in range(200):
        queue.put("busy", "busy", 1.0, 1.0)
    served(queue, 100)
    for _ in range(100):
        queue.put("idler", "idler", 1.0, 1.0)
    assert Counter(served(queue, 100))["idler"] == pytest.approx(50, abs=2)


def test_a_flow_that_comes_and_goes_gains_nothing() -> None:
    """Served one at a time, it has nothing queued in between, and still gets no more than its share."""
    queue: FairQueue[str] = FairQueue()
    for _ in range(300):
        queue.put("steady", "steady", 1.0, 1.0)
    taken: Counter[str] = Counter()
    waiting = False
    for _ in range(200):
        if not waiting:
            queue.put("hasty", "hasty", 1.0, 1.0)
            waiting = True
        (item,) = served(queue, 1)
        taken[item] += 1
        waiting = waiting and item != "hasty"
    assert taken["hasty"] == pytest.approx(100, abs=2)


def test_what_leaves_is_not_charged() -> None:
    queue: FairQueue[str] = FairQueue()
    gone = [queue.put("gone", "a", 1.0, 100.0) for _ in range(5)]
    queue.put("b", "b", 1.0, 1.0)
    queue.put("a", "a", 1.0, 1.0)
    for ticket in gone:
        queue.remove(ticket)
        queue.remove(ticket)
    assert len(queue) == 2
    assert sorted(served(queue, 2)) == ["a", "b"]


def test_taking_out_of_turn_is_charged() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.put("a1", "a", 1.0, 1.0)
    large = queue.put("a2", "a", 1.0, 10.0)
    for number in range(12):
        queue.put(f"b{number}", "b", 1.0, 1.0)
    assert queue.take(large) == "a2"
    assert "a1" not in served(queue, 9)
    assert "a1" in served(queue, 3)


def test_flows_are_forgotten_when_they_owe_nothing() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(4 * MAX_IDLE_FLOWS):
        queue.take(queue.put(number, number, 1.0, 1.0))
    assert len(queue._flows) <= MAX_IDLE_FLOWS + 2


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from([1.0, 8.0]), st.floats(0.01, 10)), max_size=60), st.randoms()
)
def test_everything_is_served_once_and_in_the_announced_order(
    puts: list[tuple[int, float, float]], chance: random.Random
) -> None:
    queue: FairQueue[int] = FairQueue()
    tickets = [queue.put(number, flow, weight, cost) for number, (flow, weight, cost) in enumerate(puts)]
    removed = set(chance.sample(range(len(tickets)), len(tickets) // 4))
    for number in removed:
        queue.remove(tickets[number])
    announced = [ticket.item for ticket in queue.ahead()]
    assert announced == [ticket.item for ticket in itertools.islice(queue.ahead(), len(puts))], (
        "looking changes nothing"
    )
    taken = []
    while len(queue):
        taken.append(queue.take(next(queue.ahead())))
    assert sorted(taken) == sorted(set(range(len(puts))) - removed)
    assert taken == announced


def test_a_weight_that_is_none_is_refused() -> None:
    queue: FairQueue[str] = FairQueue()
    with pytest.raises(ValueError, match="weight must be positive"):
        queue.put("a", "a", 0.0, 1.0)
    with pytest.raises(ValueError, match="cost not negative"):
        queue.put("a", "a", 1.0, -1.0)


def test_what_moves_up_is_charged_to_its_new_flow() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(20):
        queue.put(f"other {number}", "other", 8.0, 1.0)
    bulk = [queue.put(f"bulk {number}", "bulk", 1.0, 1.0) for number in range(4)]
    served(queue, 4)
    queue.move(bulk[3], "caller", 8.0)
    queue.move(bulk[3], "caller", 8.0)
    assert len(queue) == 20
    assert "bulk 3" in served(queue, 2)
    queue.move(bulk[3], "bulk", 1.0)
    assert "bulk 3" not in served(queue, len(queue)), "what is served cannot come back"


def test_a_flow_that_only_lost_items_to_another_owes_nothing() -> None:
    queue: FairQueue[str] = FairQueue()
    moved = queue.put("moved", "a", 1.0, 100.0)
    queue.put("b", "b", 1.0, 1.0)
    queue.move(moved, "c", 1.0)
    queue.put("a", "a", 1.0, 1.0)
    assert queue.take(moved) == "moved"
    queue.put("c", "c", 1.0, 1.0)
    assert served(queue, 2) == ["a", "b"], "only the flow that was served waits"


def test_a_move_needs_a_weight() -> None:
    queue: FairQueue[str] = FairQueue()
    ticket = queue.put("a", "a", 1.0, 1.0)
    with pytest.raises(ValueError, match="weight must be positive"):
        queue.move(ticket, "a", 0.0)


class Model:
    """The same rule, written without regard to what it costs."""

    def __init__(self) -> None:
        self.queued: dict[int, list[tuple[int, float]]] = {}
        self.starts: dict[int, float] = {}
        self.orders: dict[int, int] = {}
        self.now = self.latest = 0.0

    def put(self, number: int, flow: int, cost: float) -> None:
        if not self.queued.get(flow):
            self.starts[flow] = max(self.starts.get(flow, self.now), self.now)
        self.orders.setdefault(flow, len(self.orders))
        self.queued.setdefault(flow, []).append((number, cost))

    def ahead(self) -> list[int]:
        tagged = []
        for flow, items in self.queued.items():
            start = self.starts[flow]
            for place, (number, cost) in enumerate(items):
                tagged.append((start, self.orders[flow], place, number))
                start += cost / (flow + 1)
        return [number for *_, number in sorted(tagged)]

    def leave(self, number: int, *, is_served: bool) -> None:
        ((flow, item),) = [(flow, item) for flow, items in self.queued.items() for item in items if item[0] == number]
        if is_served:
            self.now = max(self.now, self.starts[flow])
            self.starts[flow] += item[1] / (flow + 1)
            self.latest = max(self.latest, self.starts[flow])
        self.queued[flow].remove(item)
        if not any(self.queued.values()):
            self.now, self.queued, self.starts, self.orders = self.latest, {}, {}, {}


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(0, 5), st.sampled_from([0.0, 0.5, 1.0, 3.0])),
            st.tuples(st.sampled_from(["take", "remove"]), st.integers(0, 3), st.just(0.0)),
        ),
        max_size=150,
    )
)
def test_the_order_is_that_of_the_rule(steps: list[tuple[str, int, float]]) -> None:
    queue: FairQueue[int] = FairQueue()
    model = Model()
    tickets = {}
    for number, (step, choice, cost) in enumerate(steps):
        if step == "put":
            tickets[number] = queue.put(number, choice, choice + 1.0, cost)
            model.put(number, choice, cost)
        elif due := model.ahead()[: choice + 1]:
            ticket = tickets[due[-1]]
            model.leave(ticket.item, is_served=step == "take")
            queue.take(ticket) if step == "take" else queue.remove(ticket)
        assert [ticket.item for ticket in queue.ahead()] == model.ahead()


def test_what_is_taken_together_is_charged_as_if_one_by_one() -> None:
    draw = random.Random(3)

    def filled() -> tuple[FairQueue[int], list[Ticket[int]]]:
        queue: FairQueue[int] = FairQueue()
        costs = random.Random(5)
        return queue, [queue.put(n, n % 3, 1.0 + n % 2, costs.uniform(0, 4)) for n in range(40)]

    for num_taken in (1, 17, 40):
        (one, ones), (both, all_of_them) = filled(), filled()
        places = draw.sample(range(40), num_taken)
        for place in places:
            one.take(ones[place])
        both.take_all([all_of_them[place] for place in places])
        assert len(one) == len(both) == 40 - num_taken
        for queue in (one, both):
            queue.put(100, "late", 1.0, 1.0)
            queue.put(101, 0, 1.0, 1.0)
        assert [ticket.item for ticket in one.ahead()] == [ticket.item for ticket in both.ahead()]


@pytest.mark.parametrize("num_flows", [1, 2])
def test_a_queue_that_never_runs_empty_keeps_nothing_of_what_is_over(num_flows: int) -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(20):
        queue.put(number, number % num_flows, 1.0, 1.0)
    for number in range(2000):
        queue.put(number, number % num_flows, 1.0, 1.0)
        queue.take_all(list(itertools.islice(queue.ahead(), 1)))
    assert len(queue) == 20
    assert len(queue._heap) <= 2 * MAX_STALE
