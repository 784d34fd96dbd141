"""Which rank encodes what: predicted cost, and longest processing time first. Free of torch and numpy."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import combinations
from math import isfinite
from typing import Final, TypeAlias

from encoder.config import EncoderConfig

DEFAULT_FLOPS_PER_SECOND: Final = 1e11
"""Two cores of a server CPU in float32. Only the ratios of costs decide an assignment."""

EXCHANGES_PER_RANK: Final = 4
"""How often, at most, an assignment is evened out afterwards."""
EVEN_ENOUGH: Final = 0.002
"""An end that is later than the mean by this part is left as it is."""
FEW_ITEMS: Final = 8
"""Of as many, two may change their rank at once: small shares have few ways to be evened out otherwise."""
SMALLEST_GAIN: Final = 1e-6
"""Of the latest end. Less is rounding."""

NUM_NUMBERS: Final = 5
"""Of a cost model."""

Work: TypeAlias = tuple[float, float, float, float]
"""What a batch is made of: launches, items, patches, and the sum of the squares of its items' patches."""

_Bundle: TypeAlias = tuple[float, tuple[int, ...]]
"""The cost of some items, and which."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Predicts the seconds of a batch from its items' patches: linear layers, and attention that grows by square.

    `num_at_once`: items of a batch that are encoded side by side, each by a thread of its own; 1 where a batch is one
    packed sequence, or where its items follow each other.
    """

    seconds_per_launch: float
    seconds_per_patch: float
    seconds_per_patch_squared: float
    seconds_per_item: float = 0.0
    num_at_once: int = 1

    @classmethod
    def from_config(
        cls,
        config: EncoderConfig,
        *,
        flops_per_second: float = DEFAULT_FLOPS_PER_SECOND,
        seconds_per_launch: float = 0.0,
    ) -> "CostModel":
        """Derive the costs from the work of the model's matrix products."""
        return cls(
            seconds_per_launch=seconds_per_launch,
            seconds_per_patch=linear_flops_per_patch(config) / flops_per_second,
            seconds_per_patch_squared=attention_flops_per_patch_squared(config) / flops_per_second,
        )

    def item_seconds(self, patches: int) -> float:
        """Return the predicted seconds that one item of that many patches adds to what its rank has to do."""
        per_patch = self.seconds_per_patch + patches * self.seconds_per_patch_squared
        return (self.seconds_per_item + patches * per_patch) / self.num_at_once

    def batch_seconds(self, patches: Sequence[int]) -> float:
        """Return the predicted seconds of one batch of items, its launch included; 0 for an empty one."""
        if not patches:
            return 0.0
        launches, items, linear, squared = self.work(patches)
        return (
            launches * self.seconds_per_launch
            + items * self.seconds_per_item
            + linear * self.seconds_per_patch
            + squared * self.seconds_per_patch_squared
        )

    def work(self, patches: Sequence[int]) -> Work:
        """Return the work that decides how long a batch takes: its threads' share each, or the largest item alone."""
        total, largest = sum(patches), max(patches)
        if self.num_at_once * largest > total:
            return 1.0, 1.0, float(largest), float(largest**2)
        squared = sum(count * count for count in patches)
        return 1.0, len(patches) / self.num_at_once, total / self.num_at_once, squared / self.num_at_once

    def numbers(self) -> list[float]:
        """Return what `from_numbers` makes the same model of."""
        return [
            self.seconds_per_launch,
            self.seconds_per_patch,
            self.seconds_per_patch_squared,
            self.seconds_per_item,
            float(self.num_at_once),
        ]

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> "CostModel":
        """Make a model of its numbers, from wherever. Raises `ValueError` unless larger items have higher costs."""
        if len(numbers) != NUM_NUMBERS or not all(isfinite(number) and number >= 0 for number in numbers):
            raise ValueError(f"a cost model has {NUM_NUMBERS} finite numbers, none of them negative")
        launch, patch, squared, item, num_at_once = map(float, numbers)
        if patch + squared <= 0 or num_at_once < 1 or not num_at_once.is_integer():
            raise ValueError("a cost model has a cost for patches, and encodes a whole number of items at once")
        return cls(launch, patch, squared, item, int(num_at_once))

    def scaled(self, factor: float) -> "CostModel":
        """Return the model of a device that takes that many times as long."""
        return CostModel(
            factor * self.seconds_per_launch,
            factor * self.seconds_per_patch,
            factor * self.seconds_per_patch_squared,
            factor * self.seconds_per_item,
            self.num_at_once,
        )


def linear_flops_per_patch(config: EncoderConfig) -> int:
    """Return the floating-point operations per patch outside attention; the projector runs once per merged token."""
    hidden, merged = config.hidden_size, config.merged_width
    block = 4 * hidden * hidden + 2 * hidden * config.mlp_size
    projector = merged * (merged + config.text_width) // config.merge_size**2
    return 2 * (config.patch_values * hidden + config.num_layers * block + projector)


def attention_flops_per_patch_squared(config: EncoderConfig) -> int:
    """Return the operations of both attention products, over all layers, for an item of one patch."""
    return 4 * config.hidden_size * config.num_layers


def assign(costs: Sequence[float], queued: Sequence[float]) -> list[int]:
    """Return a rank for each item, so that the last rank finishes early.

    `costs` are the items' predicted seconds, `queued` the seconds of work that each rank already has. Dearest items
    first, each to the rank that is free soonest; then, a bounded number of times, the rank that finishes last gives
    another one an item, or swaps one, where that brings its end forward. Ties go to the earlier item and the lower
    rank, so that the same input always gives the same answer. With empty queues the longest load is at most 4/3 of
    the best possible. Raises `ValueError` if there is no rank.
    """
    if not queued:
        raise ValueError("assign: at least one rank is needed")
    if len(queued) == 1:
        return [0] * len(costs)
    loads = list(queued)
    shares: list[list[int]] = [[] for _ in queued]
    ends = [(load, rank) for rank, load in enumerate(loads)]
    heapify(ends)
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        load, rank = ends[0]
        shares[rank].append(item)
        loads[rank] = load + costs[item]
        heapreplace(ends, (loads[rank], rank))
    if len(costs) > 1:
        _even_out(costs, loads, shares)
    ranks = [0] * len(costs)
    for rank, share in enumerate(shares):
        for item in share:
            ranks[item] = rank
    return ranks


def _even_out(costs: Sequence[float], loads: list[float], shares: list[list[int]]) -> None:
    """Take work from the rank that finishes last until nothing helps, or all is even enough, or often enough."""
    enough = sum(loads) / len(loads) * (1 + EVEN_ENOUGH)
    for _ in range(EXCHANGES_PER_RANK * len(loads)):
        *others, last = sorted(range(len(loads)), key=loads.__getitem__)
        if loads[last] <= enough or not shares[last]:
            return
        mine = _bundles(costs, shares[last])
        for other in others:
            theirs = [*_bundles(costs, shares[other]), (0.0, ())]
            found = _best_exchange(mine, theirs, loads[last] - loads[other], SMALLEST_GAIN * loads[last])
            if found is not None:
                moved, given, taken = found
                shares[last] = [item for item in shares[last] if item not in given] + list(taken)
                shares[other] = [item for item in shares[other] if item not in taken] + list(given)
                loads[last] -= moved
                loads[other] += moved
                break
        else:
            return


def _bundles(costs: Sequence[float], share: Sequence[int]) -> list[_Bundle]:
    """What a rank may give away in one go, the dearest first: an item, or two of a share that is small."""
    sizes = (1, 2) if len(share) <= FEW_ITEMS else (1,)
    bundles = [(sum(costs[item] for item in items), items) for size in sizes for items in combinations(share, size)]
    return sorted(bundles, key=lambda bundle: -bundle[0])


def _best_exchange(
    mine: Sequence[_Bundle], theirs: Sequence[_Bundle], gap: float, gain: float
) -> tuple[float, tuple[int, ...], tuple[int, ...]] | None:
    """Return what to give for what, and the seconds that move, so that the later of two ends is `gain` earlier or more.

    Best is to move half of the `gap` between the ends.
    """
    best, place = None, 0
    for cost, items in mine:
        # The cheaper what is given, the cheaper what comes back: neither has to be looked at twice.
        while place < len(theirs) - 1 and cost - theirs[place][0] < gap / 2:
            place += 1
        for back, taken in theirs[max(place - 1, 0) : place + 1]:
            moved = cost - back
            if min(moved, gap - moved) > gain:
                gain, best = min(moved, gap - moved), (moved, items, taken)
    return best
