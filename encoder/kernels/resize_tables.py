"""Weights of Pillow's 8-bit bicubic resize with antialias, of one side, in units of 2^-22. Free of torch."""

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

GROUP: Final = 4
"""Taps that the horizontal pass takes at a time; a table has a multiple of it."""
_UNIT: Final = 1 << 22
_SUPPORT: Final = 2.0

Integers: TypeAlias = npt.NDArray[np.int32]
Doubles: TypeAlias = npt.NDArray[np.float64]


def resize_table(length: int, size: int) -> tuple[Integers, int]:
    """Return the table of a side of `length` pixels resized to `size`, and the taps of its widest window.

    The table is int32 `[1 + taps, size]`, its taps rounded up to a multiple of `GROUP`: each output pixel's first
    input pixel, then its weights, zero beyond its window. Double arithmetic in Pillow's own order of operations.
    """
    scale = length / size
    stretch = max(scale, 1.0)
    centre = (np.arange(size) + 0.5) * scale
    first = np.maximum(centre - _SUPPORT * stretch + 0.5, 0.0).astype(np.int64)
    last = np.minimum((centre + _SUPPORT * stretch + 0.5).astype(np.int64), length)
    num_taps = int((last - first).max())
    taps = np.arange(num_taps)[:, None]
    values = _cubic((taps + first - centre + 0.5) * (1.0 / stretch))
    values[taps >= last - first] = 0.0
    values /= _sum_in_order(values)
    scaled = values * _UNIT
    table = np.zeros((1 + -(-num_taps // GROUP) * GROUP, size), np.int32)
    table[0] = first
    table[1 : 1 + num_taps] = scaled + np.copysign(0.5, scaled)
    return table, num_taps


def _sum_in_order(values: Doubles) -> Doubles:
    """The sum over taps, first to last: another order rounds otherwise."""
    total = np.zeros(values.shape[1])
    for line in values:
        total += line
    return total


def _cubic(x: Doubles) -> Doubles:
    x = np.abs(x)
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))
