import math

import numpy as np
import pytest

from encoder.config import ProcessorConfig
from encoder.errors import ImageError
from encoder.preprocess import Pixels, preprocess, resize
from encoder.sizing import grid_thw, resized_size

PROCESSOR = ProcessorConfig()


def noise(height: int, width: int, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def cubic(x: float) -> float:
    x, a = abs(x), -0.5
    if x < 1:
        return ((a + 2) * x - (a + 3)) * x * x + 1
    return (((x - 5) * x + 8) * x - 4) * a if x < 2 else 0.0


def integer_pass(lines: Pixels, size: int) -> Pixels:
    """Resize the second dimension in integers as Pillow's 8-bit code is specified, written from the formula alone."""
    length = lines.shape[1]
    scale = length / size
    stretch = max(1.0, scale)
    out = np.empty((lines.shape[0], size, 3), np.uint8)
    for i in range(size):
        centre = (i + 0.5) * scale
        first = max(0, int(centre - 2 * stretch + 0.5))
        last = min(length, int(centre + 2 * stretch + 0.5))
        weights = [cubic((x - centre + 0.5) / stretch) for x in range(first, last)]
        total = sum(weights)
        fixed = [math.trunc(w / total * 2**22 + math.copysign(0.5, w)) for w in weights]
        sums = (lines[:, first:last].astype(np.int64) * np.array(fixed)[:, None]).sum(1) + 2**21
        out[:, i] = np.clip(sums >> 22, 0, 255)
    return out


def integer_resize(image: Pixels, width: int, height: int) -> Pixels:
    if image.shape[1] != width:
        image = integer_pass(image, width)
    if image.shape[0] != height:
        image = integer_pass(image.transpose(1, 0, 2), height).transpose(1, 0, 2)
    return image


def random_size_pairs() -> list[tuple[int, int, int, int]]:
    draw = np.random.default_rng(5)
    pairs = [tuple(map(int, draw.integers(1, 160, 4))) for _ in range(60)]
    same_width = [(w, h, w, new) for w, h, new, _ in pairs[:8]]
    same_height = [(w, h, new, h) for w, h, new, _ in pairs[8:16]]
    one_pixel = [(1, 90, 1, 40), (90, 1, 40, 1), (1, 1, 1, 1), (50, 60, 1, 1), (1, 1, 5, 7)]
    return pairs + same_width + same_height + one_pixel


@pytest.mark.parametrize("pair", random_size_pairs(), ids=str)
def test_resize_equals_the_formula(pair: tuple[int, int, int, int]) -> None:
    width, height, new_width, new_height = pair
    image = noise(height, width, seed=width)
    assert np.array_equal(resize(image, new_width, new_height), integer_resize(image, new_width, new_height))


@pytest.mark.parametrize(("width", "height"), [(7600, 30), (30, 7600), (7169, 1), (1, 7169), (3000, 1400)])
def test_beyond_the_limits(width: int, height: int) -> None:
    size = resized_size(width, height, PROCESSOR)
    assert size != (width, height)
    image = noise(height, width)
    assert np.array_equal(resize(image, *size), integer_resize(image, *size))


def test_an_unchanged_image_is_not_copied() -> None:
    image = noise(20, 30)
    assert resize(image, 30, 20) is image


@pytest.mark.parametrize(("width", "height"), [(1, 1), (28, 28), (29, 27), (100, 45), (7600, 20)])
def test_rows_are_patches_in_raster_order(width: int, height: int) -> None:
    image = noise(height, width)
    rows, grid = preprocess(image, PROCESSOR)
    size = resized_size(width, height, PROCESSOR)
    padded = np.zeros((grid[1] * 14, grid[2] * 14, 3), np.uint8)
    padded[: size[1], : size[0]] = integer_resize(image, *size)
    assert grid == grid_thw(width, height, PROCESSOR)
    assert rows.dtype == np.uint8
    assert rows.shape == (grid[1] * grid[2], 3, 14, 14)
    for index, row in enumerate(rows):
        top, left = index // grid[2] * 14, index % grid[2] * 14
        assert np.array_equal(row, padded[top : top + 14, left : left + 14].transpose(2, 0, 1))


def test_strided_and_read_only_images() -> None:
    image = noise(60, 9000)
    mirrored = image[:, ::-1]
    image.flags.writeable = False
    assert np.array_equal(preprocess(mirrored, PROCESSOR)[0], preprocess(mirrored.copy(), PROCESSOR)[0])
    assert np.array_equal(preprocess(image, PROCESSOR)[0], preprocess(image.copy(), PROCESSOR)[0])


def test_rows_are_written_where_asked() -> None:
    image = noise(28, 28)
    pool = np.full((6, 3, 14, 14), 9, np.uint8)
    rows, _ = preprocess(image, PROCESSOR, pool[1:5])
    assert np.shares_memory(rows, pool)
    assert np.array_equal(pool[1:5], preprocess(image, PROCESSOR)[0])
    assert (pool[[0, 5]] == 9).all()


@pytest.mark.parametrize(
    "image",
    [
        np.zeros((4, 4), np.uint8),
        np.zeros((4, 4, 4), np.uint8),
        np.zeros((4, 4, 3), np.float32),
        np.zeros((0, 4, 3), np.uint8),
    ],
    ids=["grey", "four channels", "float", "empty"],
)
def test_what_is_not_an_image_is_refused(image: Pixels) -> None:
    with pytest.raises(ImageError):
        preprocess(image, PROCESSOR)


def test_a_wrong_output_is_refused() -> None:
    with pytest.raises(ImageError, match="out must be"):
        preprocess(noise(28, 28), PROCESSOR, np.empty((5, 3, 14, 14), np.uint8))
