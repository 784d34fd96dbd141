"""Least squares with coefficients that are not negative, for a handful of columns. Free of torch and numpy."""

from collections.abc import Sequence
from itertools import chain, combinations
from typing import Final

SMALLEST_PIVOT: Final = 1e-9
"""Of columns scaled to length one: below it, a column says nothing that the others do not say."""


class Moments:
    """Weighted sums over rows: all that a fit needs of them, in a size that does not grow."""

    def __init__(self, num_columns: int) -> None:
        self._products = [[0.0] * num_columns for _ in range(num_columns)]
        self._targets = [0.0] * num_columns

    def add(self, row: Sequence[float], target: float, weight: float = 1.0) -> None:
        """Add a row: `target` is what the columns, each times its coefficient, should sum up to."""
        for i, left in enumerate(row):
            self._targets[i] += weight * left * target
            for j, right in enumerate(row):
                self._products[i][j] += weight * left * right

    def add_relative(self, row: Sequence[float], target: float, weight: float = 1.0) -> None:
        """Add a row whose error counts in parts of its target, which is positive."""
        self.add(row, target, weight / target**2)

    def fade(self, factor: float) -> None:
        """Let everything that was added until now weigh less, by a factor below one."""
        self._targets = [factor * value for value in self._targets]
        self._products = [[factor * value for value in row] for row in self._products]

    def joined(self, other: "Moments") -> "Moments":
        """Return the sums of the rows of both, which stay as they are."""
        both = Moments(len(self._targets))
        both._targets = [a + b for a, b in zip(self._targets, other._targets, strict=True)]
        pairs = zip(self._products, other._products, strict=True)
        both._products = [[a + b for a, b in zip(mine, theirs, strict=True)] for mine, theirs in pairs]
        return both

    def fit(self) -> list[float]:
        """Return the coefficients, none of them negative, with the least sum of squared errors.

        Every choice of columns is tried, hence a handful of columns. A column that was zero in all rows has the
        coefficient zero; of columns that cannot be told apart, one has it all.
        """
        lengths = [self._products[i][i] ** 0.5 for i in range(len(self._targets))]
        useful = [i for i, length in enumerate(lengths) if length > 0]
        products = [[self._products[i][j] / (lengths[i] * lengths[j]) for j in useful] for i in useful]
        targets = [self._targets[i] / lengths[i] for i in useful]
        best, explained = [0.0] * len(useful), 0.0
        places = range(len(useful))
        for chosen in chain.from_iterable(combinations(places, size) for size in range(1, len(useful) + 1)):
            found = _solved([[products[i][j] for j in chosen] for i in chosen], [targets[i] for i in chosen])
            if found is None or min(found) < 0:
                continue
            # At the least error of these columns alone, this is what they explain of the squared targets.
            if (part := sum(value * targets[i] for value, i in zip(found, chosen, strict=True))) > explained:
                best, explained = [0.0] * len(useful), part
                for value, i in zip(found, chosen, strict=True):
                    best[i] = value
        coefficients = [0.0] * len(self._targets)
        for value, i in zip(best, useful, strict=True):
            coefficients[i] = value / lengths[i]
        return coefficients


def _solved(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Solve a symmetric system with ones on its diagonal by elimination; None if it has no single solution."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for column in range(size):
        if rows[column][column] < SMALLEST_PIVOT:
            return None
        for below in range(column + 1, size):
            factor = rows[below][column] / rows[column][column]
            rows[below] = [b - factor * a for a, b in zip(rows[column], rows[below], strict=True)]
    found = [0.0] * size
    for column in reversed(range(size)):
        known = sum(rows[column][j] * found[j] for j in range(column + 1, size))
        found[column] = (rows[column][size] - known) / rows[column][column]
    return found
