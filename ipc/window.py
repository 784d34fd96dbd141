"""The cheapest contiguous window: which neighbouring extents to give up for a new one.

With n extents in the order of offsets there are n + 1 gaps, some of them empty: gap i lies before extent i, from
`begins[i]` to `limits[i]`. A window from gap i to gap j gives up the extents i .. j-1 and yields the bytes from
`begins[i]` to `limits[j]`. The search is exact, and goes over all extents in a few vector operations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

MAX_WINDOW_RATIO = 3
MIN_AGE_SECONDS = 1e-3
# Bytes freed beyond the need are not lost, the next request may use them. Half their price gives the most hits for the
# least unused memory on the trace of benchmarks/allocator.py.
WASTE_WEIGHT = 0.5
KEPT = float("inf")
_SAMPLE_STRIDE = 16


class Columns(NamedTuple):
    """Gaps and extents as columns.

    Gap i goes from byte `begins[i]` to byte `limits[i]`. Extent i, after it, costs `seconds[rows[i]]` to make again,
    infinity if it has to be kept, and was last used at `used_at[rows[i]]`.
    """

    begins: Ints
    limits: Ints
    rows: Ints
    seconds: Floats
    used_at: Floats


class WindowSearch:
    """The search, with memory of its own that is used again by each call: fresh arrays would cost most of its time."""

    def __init__(self) -> None:
        self._grow(256)

    def find(self, columns: Columns, size: int, now: float) -> tuple[int, int] | None:
        """The gaps at which the cheapest window of at least `size` bytes begins and ends, or None if there is none.

        No single gap has `size` bytes.
        """
        begins, limits, rows, seconds, used_at = columns
        if len(rows) > len(self._prices):
            self._grow(2 * len(rows))
        prices = self._price(seconds, used_at, rows, now)
        first = self._candidates(begins, limits, prices, size)
        if len(first) == 0:
            return None
        total = self._total[: len(begins)]
        prices.cumsum(out=total[1:])
        windows = _Windows(begins, limits, total, size)
        bound = windows.bound(first[::_SAMPLE_STRIDE])
        if bound < KEPT:
            # What an extent adds to the total: never more, after rounding, than what a window that begins with it adds.
            np.subtract(total[1:], total[:-1], out=prices)
            first = first[prices.take(first) <= bound]
        return windows.cheapest(first)

    def _price(self, seconds: Floats, used_at: Floats, rows: Ints, now: float) -> Floats:
        """Seconds to make again over seconds since the last use; infinity for kept extents."""
        prices, ages = self._prices[: len(rows)], self._ages[: len(rows)]
        seconds.take(rows, out=prices, mode="clip")
        used_at.take(rows, out=ages, mode="clip")
        np.subtract(now, ages, out=ages)
        np.maximum(ages, MIN_AGE_SECONDS, out=ages)
        return np.divide(prices, ages, out=prices)

    def _candidates(self, begins: Ints, limits: Ints, prices: Floats, size: int) -> Ints:
        """The gaps from which `size` bytes are in reach before the next kept extent, whose prices become 0."""
        num_gaps = len(begins)
        kept = prices == KEPT
        prices[kept] = 0.0
        num_kept_before, reach = self._num_kept[:num_gaps], self._reach[:num_gaps]
        kept.cumsum(out=num_kept_before[1:])
        stops = limits[np.append(kept.nonzero()[0], num_gaps - 1)]
        stops.take(num_kept_before, out=reach, mode="clip")
        np.subtract(reach, begins, out=reach)
        return (reach >= size).nonzero()[0]

    def _grow(self, num_extents: int) -> None:
        self._prices = np.empty(num_extents)
        self._ages = np.empty(num_extents)
        self._total = np.zeros(num_extents + 1)
        self._num_kept = np.zeros(num_extents + 1, np.int64)
        self._reach = np.empty(num_extents + 1, np.int64)


class _Windows:
    """The windows of one search. Each is the shortest that begins in its first gap."""

    __slots__ = ("begins", "limits", "size", "total", "waste_price")

    def __init__(self, begins: Ints, limits: Ints, total: Floats, size: int) -> None:
        self.begins = begins
        self.limits = limits
        self.total = total  # of the prices of the extents before each gap
        self.size = size
        self.waste_price = WASTE_WEIGHT * float(total[-1] / limits[-1])  # of a byte; the pool's average

    def bound(self, first: Ints) -> float:
        """What the cheapest of these windows costs: no extent with a higher price is in the cheapest of all."""
        last = self._ends(first)
        return float(self._costs(first, last, self._waste(first, last)).min())

    def cheapest(self, first: Ints) -> tuple[int, int]:
        """The window of the lowest cost, or the smallest if all are too large."""
        last = self._ends(first)
        waste = self._waste(first, last)
        costs = self._costs(first, last, waste)
        best = int(costs.argmin())
        if costs[best] == KEPT:
            best = int(waste.argmin())
        return int(first[best]), int(last[best])

    def _ends(self, first: Ints) -> Ints:
        targets = self.begins.take(first) + self.size
        last = first + 1
        longer = (self.limits.take(last) < targets).nonzero()[0]
        last[longer] = self.limits.searchsorted(targets[longer])
        return last

    def _waste(self, first: Ints, last: Ints) -> Ints:
        waste: Ints = self.limits.take(last) - self.begins.take(first) - self.size
        return waste

    def _costs(self, first: Ints, last: Ints, waste: Ints) -> Floats:
        costs: Floats = self.total.take(last) - self.total.take(first) + waste * self.waste_price
        costs[waste > (MAX_WINDOW_RATIO - 1) * self.size] = KEPT
        return costs
