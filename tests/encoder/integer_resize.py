"""Pillow's 8-bit bicubic written from its formula alone, in integers: the truth that resizing is held to.

Of each pass, weights are `[size, taps]` and every output pixel gathers its own window of the input.
"""

import numpy as np
import numpy.typing as npt

from encoder.preprocess import Pixels

Integers = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]


def integer_resize(image: Pixels, width: int, height: int) -> Pixels:
    """Return `[height, width, 3]`: across then down, uint8 in between; a side that stays is skipped."""
    if image.shape[1] != width:
        image = _columns(image, width)
    if image.shape[0] != height:
        image = _columns(image.transpose(1, 0, 2), height).transpose(1, 0, 2)
    return image


def _columns(image: Pixels, size: int) -> Pixels:
    first, weights = weights_of(image.shape[1], size)
    lines = np.ascontiguousarray(image.transpose(1, 0, 2))
    sums = 2**21 + (_by_tap if weights.shape[1] < size else _by_pixel)(lines, first, weights)
    assert np.abs(sums).max() < 2**31, "the accumulator is 32 bits wide"
    return np.clip(sums >> 22, 0, 255).astype(np.uint8).transpose(1, 0, 2)


def _by_tap(lines: Pixels, first: Integers, weights: Integers) -> Integers:
    sums = np.zeros((len(first), *lines.shape[1:]), np.int64)
    for tap, weight in enumerate(weights.T):
        sums += lines[np.minimum(first + tap, len(lines) - 1)] * weight[:, None, None]
    return sums


def _by_pixel(lines: Pixels, first: Integers, weights: Integers) -> Integers:
    """The same, for few pixels of many taps. The sums are whole numbers below 2^53, which doubles hold exactly."""
    flat = lines.reshape(len(lines), -1).astype(np.float64)
    windows = [flat[start : start + weights.shape[1]] for start in first]
    sums = [row[: len(window)] @ window for row, window in zip(weights.astype(np.float64), windows, strict=True)]
    return np.array(sums).astype(np.int64).reshape(len(first), *lines.shape[1:])


def weights_of(length: int, size: int) -> tuple[Integers, Integers]:
    """Return the first input pixel of each output pixel, and its weights in units of 2^-22, zero beyond its window."""
    scale = length / size
    stretch = max(1.0, scale)
    centre = (np.arange(size) + 0.5) * scale
    first = np.maximum(0, np.trunc(centre - 2 * stretch + 0.5)).astype(np.int64)
    last = np.minimum(length, np.trunc(centre + 2 * stretch + 0.5)).astype(np.int64)
    taps = np.arange((last - first).max())
    values = _cubic((first[:, None] + taps - centre[:, None] + 0.5) / stretch)
    values[taps >= (last - first)[:, None]] = 0.0
    total = np.zeros(size)
    for column in values.T:  # one by one, as the formula sums: np.sum would round otherwise
        total += column
    scaled = values / total[:, None] * 2**22
    return first, np.trunc(scaled + np.copysign(0.5, scaled)).astype(np.int64)


def _cubic(x: Doubles) -> Doubles:
    x, a = np.abs(x), -0.5
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))
