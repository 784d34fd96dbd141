import numpy as np
import pytest

from encoder.config import ProcessorConfig
from encoder.errors import ImageError
from encoder.preprocess import Pixels, preprocess
from encoder.sizing import grid_thw, resized_size
from tests.encoder.integer_resize import integer_resize

PROCESSOR = ProcessorConfig()


def noise(height: int, width: int, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


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
