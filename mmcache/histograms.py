"""Counts of durations by size: cheap enough for every request, and right over any time, unlike the last so many."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

FAST_S = (
    0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0,
    2.5, 10.0,
)  # fmt: skip
"""Bounds in seconds of what takes microseconds when all is well."""
SLOW_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Bounds in seconds of what an encoder or a queue takes."""
LONG_S = (0.001, 0.01, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0)
"""Bounds in seconds of what a client holds."""


class Histogram:
    """Observations since the start, by upper bounds.

    Attributes:
        bounds: of each bucket but the last, which has none, in ascending order; a value equal to a bound is below it.
        counts: observations in each bucket, one more than there are bounds.
        total: the sum of all observations.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, or as many that are equal."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def __len__(self) -> int:
        """How many observations there are."""
        return sum(self.counts)

    def cumulative(self) -> Iterator[tuple[float | None, int]]:
        """Each bound, None for no bound at last, and how many observations are at most that."""
        so_far = 0
        for bound, count in zip((*self.bounds, None), self.counts, strict=True):
            so_far += count
            yield bound, so_far
