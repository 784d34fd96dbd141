import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder.config import ProcessorConfig
from encoder.errors import ImageError
from encoder.sizing import grid_thw, num_patches, num_tokens, resized_size

PROCESSOR = ProcessorConfig()
SIDES = st.integers(1, 30_000)


@pytest.mark.parametrize(
    ("width", "height", "tokens"),
    [
        (640, 480, 414),
        (1280, 720, 1196),
        (1024, 1024, 1369),
        (1920, 1080, 2691),
        (3840, 2160, 4214),
        (448, 449, 272),
        (1, 1, 1),
    ],
)
def test_tokens_of_known_sizes(width: int, height: int, tokens: int) -> None:
    assert num_tokens(grid_thw(width, height, PROCESSOR), 2) == tokens


def test_padding_may_exceed_the_limit() -> None:
    grid = grid_thw(488, 7025, PROCESSOR)
    assert num_patches(grid) == 17_784
    assert num_tokens(grid, 2) == 4446


def test_time_is_pooled_away() -> None:
    assert num_patches((4, 10, 6)) == 240
    assert num_tokens((4, 10, 6), 2) == num_tokens((1, 10, 6), 2) == 15


@pytest.mark.parametrize(("width", "height"), [(7169, 1), (20_000, 14), (10_000, 10_000)])
def test_a_side_stays_within_its_limit(width: int, height: int) -> None:
    assert max(resized_size(width, height, PROCESSOR)) <= PROCESSOR.max_side == 7168


@given(SIDES, SIDES)
def test_never_larger_and_always_mergeable(width: int, height: int) -> None:
    new_width, new_height = resized_size(width, height, PROCESSOR)
    assert 1 <= new_width <= min(width, 7168)
    assert 1 <= new_height <= min(height, 7168)
    time, rows, columns = grid_thw(width, height, PROCESSOR)
    assert time == 1
    assert rows % 2 == columns % 2 == 0
    assert 0 <= rows * 14 - new_height < 28
    assert 0 <= columns * 14 - new_width < 28


@given(SIDES, SIDES)
def test_turning_the_image_turns_the_result(width: int, height: int) -> None:
    assert resized_size(width, height, PROCESSOR) == resized_size(height, width, PROCESSOR)[::-1]


@pytest.mark.parametrize(("width", "height"), [(0, 5), (5, 0), (-1, 5)])
def test_an_empty_image_is_refused(width: int, height: int) -> None:
    with pytest.raises(ImageError, match=f"{width}x{height}"):
        resized_size(width, height, PROCESSOR)
