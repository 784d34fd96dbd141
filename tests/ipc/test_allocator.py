"""The allocator: best fit, coalescing, and windows against an exhaustive search."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc.allocator import Allocator
from ipc.window import MAX_WINDOW_RATIO, MIN_AGE_SECONDS, WASTE_WEIGHT

UNIT = 256
NOW = 1000.0


def filled(sizes: list[int], capacity: int | None = None) -> tuple[Allocator, list[int]]:
    """An allocator with one extent after another, sizes in units."""
    allocator = Allocator(UNIT * (sum(sizes) if capacity is None else capacity))
    offsets = [allocator.allocate(UNIT * size) for size in sizes]
    assert None not in offsets
    return allocator, [offset for offset in offsets if offset is not None]


def offer_all(allocator: Allocator, offsets: list[int], seconds: float = 1.0) -> None:
    for offset in offsets:
        allocator.offer(offset, seconds, NOW - 10)


def test_offsets_and_sizes_are_aligned_and_capacity_is_rounded_down() -> None:
    allocator = Allocator(4 * UNIT + 100)
    assert allocator.capacity_bytes == 4 * UNIT
    assert [allocator.allocate(nbytes) for nbytes in (1, UNIT, UNIT + 1)] == [0, UNIT, 2 * UNIT]
    assert allocator.bytes_used == allocator.capacity_bytes
    assert allocator.allocate(1) is None
    allocator.check()


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="capacity_bytes"):
        Allocator(UNIT - 1)
    allocator = Allocator(UNIT)
    with pytest.raises(ValueError, match="positive"):
        allocator.allocate(0)
    with pytest.raises(ValueError, match="no extent begins"):
        allocator.free(0)


def test_the_smallest_free_range_that_fits_is_used() -> None:
    allocator, offsets = filled([5, 1, 2, 1, 3, 1])
    for index in (0, 2, 4):
        allocator.free(offsets[index])
    assert allocator.allocate(2 * UNIT) == offsets[2]
    assert allocator.allocate(3 * UNIT) == offsets[4]
    assert allocator.allocate(3 * UNIT) == offsets[0]
    allocator.check()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_freed_neighbours_become_one_range(order: tuple[int, ...]) -> None:
    allocator, offsets = filled([1, 1, 1])
    for index in order:
        allocator.free(offsets[index])
        allocator.check()
    assert allocator.allocate(3 * UNIT) == 0


def test_no_window_is_needed_where_a_free_range_fits() -> None:
    allocator, offsets = filled([2, 2])
    offer_all(allocator, offsets)
    allocator.free(offsets[1])
    assert allocator.window(2 * UNIT, NOW) == []


def test_the_cheapest_extent_of_fitting_size_goes() -> None:
    allocator, offsets = filled([2] * 8)
    offer_all(allocator, offsets)
    allocator.offer(offsets[5], 0.5, NOW - 10)
    assert allocator.window(2 * UNIT, NOW) == [offsets[5]]


def test_the_least_recently_used_of_equal_cost_goes() -> None:
    allocator, offsets = filled([2] * 8)
    for index, offset in enumerate(offsets):
        allocator.offer(offset, 1.0, NOW - 1 - (index * 5) % 8)
    assert allocator.window(UNIT, NOW) == [offsets[3]]


def test_a_window_uses_the_free_ranges_between_its_extents() -> None:
    allocator, offsets = filled([2, 3, 2, 1, 2, 3, 2])
    offer_all(allocator, offsets, seconds=2.0)
    allocator.offer(offsets[3], 1.0, NOW - 10)
    allocator.free(offsets[2])
    allocator.free(offsets[4])
    assert allocator.window(5 * UNIT, NOW) == [offsets[3]]


def test_kept_extents_are_never_in_a_window() -> None:
    allocator, offsets = filled([2, 2, 2, 2, 2])
    offer_all(allocator, [offsets[index] for index in (0, 1, 3, 4)])
    assert set(allocator.window(4 * UNIT, NOW) or []) in ({offsets[0], offsets[1]}, {offsets[3], offsets[4]})
    assert allocator.window(5 * UNIT, NOW) is None
    allocator.keep(offsets[0])
    assert allocator.window(4 * UNIT, NOW) == offsets[3:]
    allocator.keep(offsets[4])
    assert allocator.window(4 * UNIT, NOW) is None


def test_a_reused_row_is_kept_until_it_is_offered() -> None:
    allocator, offsets = filled([2, 2])
    offer_all(allocator, offsets)
    allocator.free(offsets[0])
    assert allocator.allocate(2 * UNIT) == offsets[0]
    assert not allocator.is_offered(offsets[0])
    assert allocator.window(3 * UNIT, NOW) is None


def test_a_huge_extent_is_given_up_only_if_nothing_smaller_will_do() -> None:
    allocator, offsets = filled([100, 2, 50])
    allocator.offer(offsets[0], 1e-6, 0.0)
    allocator.offer(offsets[1], 10.0, NOW)
    allocator.offer(offsets[2], 1e-6, NOW)
    assert allocator.window(UNIT, NOW) == [offsets[1]]
    allocator.keep(offsets[1])
    assert allocator.window(UNIT, NOW) == [offsets[2]]


Layout = list[tuple[int, str, float, float]]  # size, role, cost, age


def build(layout: Layout) -> tuple[Allocator, list[tuple[int, int, float | None]]]:
    """An allocator of that layout, and its extents as (start, end, price or None if kept), sizes in bytes."""
    allocator, offsets = filled([size for size, *_ in layout])
    extents: list[tuple[int, int, float | None]] = []
    for offset, (size, role, seconds, age) in zip(offsets, layout, strict=True):
        if role == "free":
            allocator.free(offset)
            continue
        if role == "offered":
            allocator.offer(offset, seconds, NOW - age)
        price = seconds / max(age, MIN_AGE_SECONDS) if role == "offered" else None
        extents.append((offset, offset + size * UNIT, price))
    return allocator, extents


def exhaustive(extents: list[tuple[int, int, float | None]], capacity: int, size: int) -> dict[tuple[int, ...], float]:
    """The cost of every shortest window that fits, by the offsets it gives up."""
    average = sum(price or 0.0 for *_, price in extents) / capacity
    costs: dict[tuple[int, ...], float] = {}
    for first in range(len(extents)):
        begin = extents[first - 1][1] if first else 0
        for last in range(first, len(extents)):
            if extents[last][2] is None:
                break
            end = extents[last + 1][0] if last + 1 < len(extents) else capacity
            if (waste := end - begin - size) >= 0:
                window = extents[first : last + 1]
                cost = sum(price or 0.0 for *_, price in window) + WASTE_WEIGHT * average * waste
                too_large = end - begin > MAX_WINDOW_RATIO * size
                costs[tuple(start for start, *_ in window)] = 1e12 + waste if too_large else cost
                break
    return costs


LAYOUTS = st.lists(
    st.tuples(
        st.integers(1, 40),
        st.sampled_from(["free", "kept", "offered", "offered", "offered"]),
        st.floats(1e-3, 1.0),
        st.floats(0.0, 100.0),
    ),
    min_size=1,
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(LAYOUTS, st.integers(1, 120))
def test_windows_are_the_cheapest_of_an_exhaustive_search(layout: Layout, num_units: int) -> None:
    allocator, extents = build(layout)
    size = num_units * UNIT
    window = allocator.window(size, NOW)
    if window == []:
        assert allocator.allocate(size) is not None
        return
    assert allocator.allocate(size) is None
    costs = exhaustive(extents, allocator.capacity_bytes, size)
    if window is None:
        assert not costs
        return
    assert costs[tuple(window)] == pytest.approx(min(costs.values()), rel=1e-6)
    for offset in window:
        allocator.free(offset)
    assert allocator.allocate(size) is not None
    allocator.check()


@pytest.mark.parametrize("num_units", [1, 7, 40, 200])
def test_pruning_does_not_change_the_result_at_thousands_of_extents(num_units: int) -> None:
    rng = random.Random(num_units)
    roles = ["kept"] + ["offered"] * 4
    layout = [(rng.randint(1, 40), rng.choice(roles), rng.random(), rng.expovariate(0.01)) for _ in range(3000)]
    allocator, extents = build(layout)
    costs = exhaustive(extents, allocator.capacity_bytes, num_units * UNIT)
    window = allocator.window(num_units * UNIT, NOW)
    assert window
    assert costs[tuple(window)] == pytest.approx(min(costs.values()), rel=1e-6)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 3000), max_size=80), st.randoms(use_true_random=False))
def test_allocating_and_freeing_in_any_order_loses_nothing(sizes: list[int], rng: random.Random) -> None:
    allocator = Allocator(32 * 1024)
    live: list[int] = []
    for nbytes in sizes:
        if live and rng.random() < 0.4:
            allocator.free(live.pop(rng.randrange(len(live))))
        offset = allocator.allocate(nbytes)
        if offset is not None:
            live.append(offset)
        allocator.check()
    assert allocator.num_extents == len(live)
    for offset in live:
        allocator.free(offset)
    allocator.check()
    assert allocator.allocate(allocator.capacity_bytes) == 0
