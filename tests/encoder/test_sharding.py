from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder.config import PRESETS
from encoder.sharding import EVEN_ENOUGH, CostModel, assign, attention_flops_per_patch_squared, linear_flops_per_patch

COSTS = st.lists(st.floats(0, 100), max_size=40)
QUEUES = st.lists(st.floats(0, 100), min_size=1, max_size=8)


def loads(costs: list[float], queued: list[float], ranks: list[int]) -> list[float]:
    totals = list(queued)
    for cost, rank in zip(costs, ranks, strict=True):
        totals[rank] += cost
    return totals


def best_longest(costs: list[float], num_ranks: int) -> float:
    return min(
        max(loads(costs, [0.0] * num_ranks, list(ranks))) for ranks in product(range(num_ranks), repeat=len(costs))
    )


def test_dearest_first_to_whoever_is_free_soonest() -> None:
    assert assign([1, 5, 3, 2], [0, 2]) == [1, 0, 1, 0]
    assert assign([2, 2, 2, 2], [0, 0]) == [0, 1, 0, 1]
    assert assign([], [0, 0]) == []


def test_a_busy_rank_is_spared() -> None:
    assert assign([1, 1, 1], [10, 0]) == [1, 1, 1]


def test_without_a_rank_there_is_no_answer() -> None:
    with pytest.raises(ValueError, match="rank"):
        assign([1.0], [])


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_within_four_thirds_of_the_best(costs: list[int], num_ranks: int) -> None:
    items = [float(cost) for cost in costs]
    longest = max(loads(items, [0.0] * num_ranks, assign(items, [0.0] * num_ranks)))
    assert longest <= 4 / 3 * best_longest(items, num_ranks) + 1e-9


@given(st.lists(st.floats(0.01, 100), max_size=40), QUEUES)
def test_the_last_rank_has_nothing_to_give_away(costs: list[float], queued: list[float]) -> None:
    """Unless it is early enough, or was evened out often enough, none of its items would end earlier elsewhere."""
    totals = loads(costs, queued, assign(costs, queued))
    plain = loads(costs, queued, dearest_first(costs, queued))
    assert max(totals) <= max(plain) * (1 + 1e-9)
    for cost, rank in zip(costs, assign(costs, queued), strict=True):
        if totals[rank] == max(totals) > (1 + EVEN_ENOUGH) * sum(totals) / len(totals):
            assert min(totals) + cost >= max(totals) * (1 - 1e-5)


def dearest_first(costs: list[float], queued: list[float]) -> list[int]:
    totals, ranks = list(queued), [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        ranks[item] = totals.index(min(totals))
        totals[ranks[item]] += costs[item]
    return ranks


@pytest.mark.parametrize(
    ("costs", "num_ranks", "longest"),
    [
        ([3, 3, 2, 2, 2], 2, 6),  # dearest first ends at 7: one of 3 for one of 2
        ([8, 7, 6, 5, 4], 2, 15),  # dearest first ends at 17
        ([5, 5, 4, 4, 3, 3, 3], 3, 9),  # dearest first ends at 11
    ],
)
def test_ends_are_evened_out(costs: list[float], num_ranks: int, longest: float) -> None:
    idle = [0.0] * num_ranks
    assert max(loads(costs, idle, assign(costs, idle))) == longest < max(loads(costs, idle, dearest_first(costs, idle)))


@given(COSTS, QUEUES)
def test_the_same_question_has_the_same_answer(costs: list[float], queued: list[float]) -> None:
    before = (list(costs), list(queued))
    assert assign(costs, queued) == assign(costs, queued)
    assert (costs, queued) == before


def test_work_of_the_true_shape() -> None:
    config = PRESETS["kimi-k2.5"]
    assert linear_flops_per_patch(config) == pytest.approx(0.85e9, rel=0.01)
    assert attention_flops_per_patch_squared(config) == 4 * 1152 * 27


def test_cost_grows_faster_than_patches() -> None:
    model = CostModel.from_config(PRESETS["kimi-k2.5"], flops_per_second=1e12, seconds_per_launch=0.5)
    assert model.item_seconds(0) == 0
    assert model.item_seconds(2000) > 2 * model.item_seconds(1000)
    expected = 1024 * linear_flops_per_patch(PRESETS["kimi-k2.5"]) / 1e12 + 1024**2 * 4 * 1152 * 27 / 1e12
    assert model.item_seconds(1024) == pytest.approx(expected)


MODELS = st.builds(CostModel, *[st.floats(0, 1)] * 4)
BATCHES = st.lists(st.integers(1, 20_000), min_size=1, max_size=40)


@given(MODELS, BATCHES)
def test_a_batch_is_a_launch_and_its_items(model: CostModel, patches: list[int]) -> None:
    alone = sum(map(model.item_seconds, patches))
    assert model.batch_seconds(patches) == pytest.approx(model.seconds_per_launch + alone)
    assert model.scaled(3).batch_seconds(patches) == pytest.approx(3 * model.batch_seconds(patches))
    assert model.batch_seconds([]) == 0


@given(BATCHES, st.integers(1, 8))
def test_items_side_by_side_take_no_less_than_the_largest(patches: list[int], num_at_once: int) -> None:
    one = CostModel(0.0, 2e-6, 1e-10)
    some = CostModel(0.0, 2e-6, 1e-10, num_at_once=num_at_once)
    assert one.item_seconds(max(patches)) <= some.batch_seconds(patches) * (1 + 1e-9) or num_at_once * max(
        patches
    ) <= sum(patches)
    assert some.batch_seconds(patches) * (1 + 1e-9) >= one.batch_seconds(patches) / num_at_once
    assert some.batch_seconds(patches[:1]) == one.batch_seconds(patches[:1])
