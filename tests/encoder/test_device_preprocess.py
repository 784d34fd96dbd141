"""Patch rows made by kernels against Pillow's: every bit. On a CPU the kernels run under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from encoder import device_plan
from encoder.config import ProcessorConfig
from encoder.device_plan import Tiling
from encoder.device_preprocess import DevicePreprocessor
from encoder.errors import ImageError
from encoder.kernels.resize_tables import resize_table
from encoder.preprocess import Pixels, preprocess
from encoder.sizing import Grid, grid_thw, resized_size
from examples.pictures import picture_folder
from tests.encoder.integer_resize import weights_of

pytest.importorskip("triton")

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
PROCESSOR = ProcessorConfig(
    max_patches=8, max_patches_per_frame=6, image_mean=(0.48, 0.45, 0.4), image_std=(0.27, 0.26, 0.25)
)
FEW_PROGRAMS = Tiling(across_rows=64, across_columns=128, finish_rows=64, finish_columns=128)
LARGE = Tiling() if DEVICE.type == "cuda" else FEW_PROGRAMS
"""The interpreter's time goes by programs; compiled, such large ones would not fit into registers."""
FUSED = replace(LARGE, max_fused_pixels=1 << 30)


def picture(seed: int, *shape: int) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (*shape, 3), dtype=np.uint8)


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """To the nearest, but where the interpreter makes bfloat16: it cuts."""
    if dtype is torch.bfloat16 and DEVICE.type == "cpu":
        return (values.contiguous().view(torch.int32) & -65536).view(torch.float32).to(dtype)
    return values.to(dtype)


def expected(
    items: Sequence[Pixels], processor: ProcessorConfig, dtype: torch.dtype
) -> tuple[torch.Tensor, list[Grid]]:
    """As the encoder makes them of Pillow's pixels."""
    mean, std = (torch.tensor(values).view(3, 1, 1) * 255.0 for values in (processor.image_mean, processor.image_std))
    made = [preprocess(item, processor) for item in items]
    values = torch.cat([torch.from_numpy(rows) for rows, _ in made]).float().sub(mean).div(std)
    return rounded(values.flatten(1), dtype), [grid for _, grid in made]


def assert_same(
    items: Sequence[Pixels],
    processor: ProcessorConfig = PROCESSOR,
    tiling: Tiling = LARGE,
    dtype: torch.dtype = torch.float32,
) -> None:
    wanted, grids = expected(items, processor, dtype)
    rows = DevicePreprocessor(processor, DEVICE, dtype, tiling).rows(
        [torch.from_numpy(item).to(DEVICE) for item in items], grids
    )
    assert rows.dtype == dtype
    assert torch.equal(rows.cpu(), wanted)


def is_resized(shape: tuple[int, ...]) -> bool:
    return resized_size(shape[-1], shape[-2], PROCESSOR, shape[0] if len(shape) == 3 else 0) != shape[:-3:-1]


MIXED = [(28, 28), (60, 90), (1, 1), (3, 61, 100), (29, 13), (40, 300), (300, 7), (2, 20, 30), (900, 1), (1, 900)]
"""Sizes that stay, that change, and that change on one side alone; images and chunks."""


@pytest.mark.parametrize("tiling", [LARGE, FUSED], ids=["two launches", "one launch"])
def test_a_mixed_batch(tiling: Tiling) -> None:
    assert {is_resized(shape) for shape in MIXED} == {True, False}
    assert_same([picture(seed, *shape) for seed, shape in enumerate(MIXED)], tiling=tiling)


@pytest.mark.parametrize("fused", [0, 1 << 30], ids=["two launches", "one launch"])
def test_the_tiles_of_use(fused: int) -> None:
    assert_same([picture(1, 33, 170), picture(2, 12, 40)], tiling=Tiling(max_fused_pixels=fused))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_types(dtype: torch.dtype) -> None:
    levels = np.arange(768, dtype=np.int64).reshape(16, 16, 3).astype(np.uint8)
    assert_same([levels, picture(3, 50, 60)], dtype=dtype)


def test_sums_beyond_both_ends_are_clamped() -> None:
    draw = np.random.default_rng(5)
    assert_same([draw.integers(0, 2, (70, 81, 3), dtype=np.uint8) * np.uint8(255) for _ in range(2)])


@pytest.mark.skipif(find_spec("skimage") is None, reason="the pictures come with scikit-image")
@pytest.mark.parametrize("tiling", [LARGE, FUSED], ids=["two launches", "one launch"])
def test_real_pictures(tiling: Tiling) -> None:
    from PIL import Image

    items = []
    for name in ("chelsea.png", "astronaut.png"):
        with Image.open(picture_folder() / name) as image:
            items.append(np.array(image.convert("RGB").crop((60, 40, 220, 170))))
    assert_same(items, replace(PROCESSOR, max_patches=40), tiling)


@pytest.mark.parametrize("seed", range(10))
def test_any_sizes(seed: int) -> None:
    draw = np.random.default_rng(seed)
    shapes = [(draw.integers(4), draw.integers(1, 71), draw.integers(1, 121)) for _ in range(draw.integers(1, 5))]
    max_patches = int(draw.integers(1, 31))
    processor = replace(PROCESSOR, max_patches=max_patches, max_patches_per_frame=max_patches, max_patches_per_side=6)
    assert_same([picture(seed + i, *(side for side in shape if side)) for i, shape in enumerate(shapes)], processor)


def test_more_frames_than_are_searched_at_a_time() -> None:
    assert_same([picture(seed, 2, 3, 5) for seed in range(66)])


def test_items_lie_anywhere_in_one_buffer_and_rows_where_asked() -> None:
    items = [picture(7, 61, 87), picture(8, 9, 11), picture(9, 2, 45, 64), picture(10, 64, 90)]
    wanted, grids = expected(items, PROCESSOR, torch.float32)
    for gap in (1, 2, 3):
        views, start = [], gap
        buffer = torch.full((sum(item.size + gap for item in items) + gap,), 255, dtype=torch.uint8, device=DEVICE)
        for item in items:
            view = buffer[start : start + item.size].view(item.shape)
            views.append(view.copy_(torch.from_numpy(item)))
            start += item.size + gap
        pool = torch.full((len(wanted) + 2, wanted.shape[1]), torch.nan, device=DEVICE)
        out = DevicePreprocessor(PROCESSOR, DEVICE, torch.float32, LARGE).rows(views, grids, pool[1:-1])
        assert out.data_ptr() == pool[1:].data_ptr()
        assert torch.equal(out.cpu(), wanted)
        assert pool[[0, -1]].isnan().all()


def test_what_is_remembered_of_sizes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    preprocessor = DevicePreprocessor(PROCESSOR, DEVICE, torch.float32, LARGE)
    items = [picture(seed, 60, 40 + seed) for seed in range(6)]
    wanted, grids = expected(items, PROCESSOR, torch.float32)
    on_device = [torch.from_numpy(item).to(DEVICE) for item in items]
    for limits in ({}, {"MAX_TABLE_BYTES": 1500}, {"MAX_SIZES": 2}, {"MAX_SIZES": 0}, {"MAX_MIXES": 1}):
        for name, limit in limits.items():
            monkeypatch.setattr(device_plan, name, limit)
        for _ in range(2):
            assert torch.equal(preprocessor.rows(on_device, grids).cpu(), wanted)


def test_tables_are_those_of_the_formula() -> None:
    draw = np.random.default_rng(11)
    for _ in range(500):
        length, size = (int(side) for side in np.exp(draw.uniform(0, np.log(7168), 2)))
        first, weights = weights_of(length, size)
        table, num_taps = resize_table(length, size)
        assert np.array_equal(table[0], first)
        assert np.array_equal(table[1 : 1 + num_taps].T, weights)
        assert not table[1 + num_taps :].any()


def test_no_items() -> None:
    assert DevicePreprocessor(PROCESSOR, DEVICE, torch.bfloat16).rows([], []).shape == (0, 588)


def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    good = torch.zeros(30, 40, 3, dtype=torch.uint8, device=DEVICE)
    grid = grid_thw(40, 30, PROCESSOR)
    preprocessor = DevicePreprocessor(PROCESSOR, DEVICE, torch.float32, LARGE)
    out = torch.full((2 * grid[1] * grid[2], 588), torch.nan, device=DEVICE)
    for bad in (good.float(), good[:, ::2], good[..., 0], good[:0], good[None, None], good[..., :2].contiguous()):
        with pytest.raises(ImageError, match="pixels must be"):
            preprocessor.rows([good, bad], [grid, grid], out)
    with pytest.raises(ImageError, match="have the grid"):
        preprocessor.rows([good, good], [grid, (1, 2, 2)], out)
    with pytest.raises(ImageError, match="as many grids"):
        preprocessor.rows([good, good], [grid], out)
    for wrong in (out[1:], out.double(), torch.empty(588, len(out), device=DEVICE).T):
        with pytest.raises(ImageError, match="out must be"):
            preprocessor.rows([good, good], [grid, grid], wrong)
    with pytest.raises(ImageError, match="at most"):
        preprocessor.rows([torch.empty(30000, 30000, 3, dtype=torch.uint8, device=DEVICE)], [grid])
    assert out.isnan().all()
