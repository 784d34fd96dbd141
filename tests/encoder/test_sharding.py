from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder.config import PRESETS
from encoder.sharding import CostModel, assign, attention_flops_per_patch_squared, linear_flops_per_patch

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
    assert assign([1, 5, 3, 3], [0, 2]) == [1, 0, 1, 0]
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


@given(COSTS, QUEUES)
def test_no_rank_works_while_another_idles(costs: list[float], queued: list[float]) -> None:
    """A rank that received items would have been free before its last one no later than any other is in the end."""
    ranks = assign(costs, queued)
    totals = loads(costs, queued, ranks)
    assert len(ranks) == len(costs)
    for rank in set(ranks):
        cheapest = min(cost for cost, owner in zip(costs, ranks, strict=True) if owner == rank)
        assert totals[rank] - cheapest <= min(totals) + 1e-6


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
    assert model.item_seconds(0) == 0.5
    assert model.item_seconds(2000) - 0.5 > 2 * (model.item_seconds(1000) - 0.5)
    expected = 0.5 + 1024 * linear_flops_per_patch(PRESETS["kimi-k2.5"]) / 1e12 + 1024**2 * 4 * 1152 * 27 / 1e12
    assert model.item_seconds(1024) == pytest.approx(expected)
