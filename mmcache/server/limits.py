"""How long a rank may take for what it is asked to do, before it counts as hung."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from mmcache.server.costs import Predictor

BASE_S, FACTOR = 30.0, 20.0
"""Where nothing is set: besides so many times what is predicted. Other processes may have its cores or its device."""
SLOW_BYTES_PER_S = 1e8
"""Of copies and comparisons."""


class Limits:
    """Limits in seconds, worked out when they matter. `fixed_s`: the setting `encode_timeout_s`; 0 for auto."""

    def __init__(self, fixed_s: float) -> None:
        self._fixed_s = fixed_s

    def batch(self, cost: Predictor, merge_size: int, tokens: Sequence[int], frames: Sequence[int]) -> float:
        """Of a microbatch. How many frames a staged item has is not known here: it is taken for a picture."""
        sizes = [merge_size**2 * count * max(1, num) for count, num in zip(tokens, frames, strict=True)]
        return self._of(cost.batch_seconds(sizes))

    def moved(self, nbytes: int) -> Callable[[], float]:
        """Of a copy, or of a comparison."""
        return partial(self._of, nbytes / SLOW_BYTES_PER_S)

    def _of(self, predicted_s: float) -> float:
        return self._fixed_s or BASE_S + FACTOR * predicted_s
