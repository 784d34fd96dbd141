"""Which rank encodes what: predicted cost, and longest processing time first. Free of torch and numpy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from encoder.config import EncoderConfig

DEFAULT_FLOPS_PER_SECOND: Final = 1e11
"""Two cores of a server CPU in float32. Only the ratios of costs decide an assignment."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Predicts the seconds that one item takes from its patches: linear layers, plus attention that grows by square."""

    seconds_per_launch: float
    seconds_per_patch: float
    seconds_per_patch_squared: float

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
        """Return the predicted seconds of one item of that many patches."""
        return self.seconds_per_launch + patches * (self.seconds_per_patch + patches * self.seconds_per_patch_squared)


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
    first, each to the rank that is free soonest; ties go to the earlier item and the lower rank, so that the same
    input always gives the same answer. With empty queues the longest load is at most 4/3 of the best possible.
    Raises `ValueError` if there is no rank.
    """
    if not queued:
        raise ValueError("assign: at least one rank is needed")
    loads = list(queued)
    ranks = [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        ranks[item] = min(range(len(loads)), key=loads.__getitem__)
        loads[ranks[item]] += costs[item]
    return ranks
