"""Resizing against its formula. Free of torch, so that it runs on every Pillow: see `make test-pillow`."""

import os

import numpy as np
import pytest

from encoder.config import ProcessorConfig
from encoder.preprocess import Pixels, resize
from encoder.sizing import grid_thw, num_patches, resized_size
from tests.encoder.integer_resize import integer_resize

PROCESSOR = ProcessorConfig()
IS_SOAK = bool(os.environ.get("MMCACHE_SOAK"))
NUM_PAIRS = 20_000 if IS_SOAK else 2_000
NUM_LARGE = 100 if IS_SOAK else 2
MAX_VALUES = 40_000
"""Most pixels of one random picture, before and after: what keeps thousands of pairs quick."""

Pair = tuple[int, int, int, int]


def noise(height: int, width: int, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def assert_exact(image: Pixels, width: int, height: int) -> None:
    mine = resize(image, width, height)
    assert mine.shape == (height, width, 3)
    assert mine.dtype == np.uint8
    assert np.array_equal(mine, integer_resize(image, width, height)), f"{image.shape} to {width}x{height}"


def random_pair(draw: np.random.Generator) -> Pair:
    """Sides from 1 pixel up, every magnitude as likely as the next; one pair in eight keeps one of its sides."""
    width, height, new_width, new_height = (int(side) for side in np.exp(draw.uniform(0, np.log(2000), 4)))
    height = min(height, max(1, MAX_VALUES // width))
    new_height = min(new_height, max(1, MAX_VALUES // max(new_width, width)))
    kept = draw.integers(16)
    return width, height, width if kept == 0 else new_width, height if kept == 1 else new_height


def picture(draw: np.random.Generator, width: int, height: int) -> Pixels:
    """Noise, or only black and white: sums beyond both ends, where the result is clamped."""
    if draw.integers(2):
        return draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
    return draw.integers(0, 2, (height, width, 3), dtype=np.uint8) * np.uint8(255)


@pytest.mark.parametrize("seed", range(10))
def test_random_size_pairs(seed: int) -> None:
    draw = np.random.default_rng(seed)
    for _ in range(NUM_PAIRS // 10):
        width, height, new_width, new_height = random_pair(draw)
        assert_exact(picture(draw, width, height), new_width, new_height)


@pytest.mark.parametrize(
    "pair",
    [(1, 90, 1, 40), (90, 1, 40, 1), (1, 1, 1, 1), (50, 60, 1, 1), (1, 1, 5, 7), (1, 7000, 3, 2), (7000, 1, 2, 3)],
    ids=str,
)
def test_one_pixel_sides(pair: Pair) -> None:
    width, height, new_width, new_height = pair
    assert_exact(noise(height, width), new_width, new_height)


@pytest.mark.parametrize(
    ("width", "height"),
    [
        (10, 30_000),
        (30_000, 10),
        (1, 30_000),
        (7169, 1),
        (1, 7169),
        (7600, 30),
        (30, 7600),
        (7169, 200),
        (300, 9000),
        (3000, 1400),
    ],
)
def test_beyond_the_limits(width: int, height: int) -> None:
    size = resized_size(width, height, PROCESSOR)
    assert size != (width, height)
    assert max(size) <= PROCESSOR.max_side
    assert_exact(noise(height, width), *size)


@pytest.mark.parametrize(("width", "height"), [(488, 7025), (7025, 488)])
def test_items_beyond_the_patch_limit(width: int, height: int) -> None:
    """Padding comes after the limit, so the largest items are larger than the limit says."""
    assert num_patches(grid_thw(width, height, PROCESSOR)) == 17_784 > PROCESSOR.max_patches
    assert_exact(noise(height, width), *resized_size(width, height, PROCESSOR))


@pytest.mark.parametrize("seed", range(NUM_LARGE))
def test_random_large_pictures(seed: int) -> None:
    draw = np.random.default_rng(1000 + seed)
    width = int(draw.integers(1793, 3500))
    height = int(draw.integers(16384 * 196 // width + 28, 2600))
    size = resized_size(width, height, PROCESSOR)
    assert size != (width, height)
    assert_exact(noise(height, width, seed), *size)


def test_one_call_for_both_sides_would_not_do() -> None:
    """Why there are two: one call leaves the order of the passes to Pillow's version, and the order is seen."""
    image = noise(400, 30)
    across = integer_resize(image, 20, 90)
    turned = integer_resize(image.transpose(1, 0, 2), 90, 20).transpose(1, 0, 2)
    assert not np.array_equal(across, turned)
    assert np.array_equal(resize(image, 20, 90), across)


def test_an_unchanged_image_is_not_copied() -> None:
    image = noise(20, 30)
    assert resize(image, 30, 20) is image
