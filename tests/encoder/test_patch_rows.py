"""Items that come as normalised patch rows: the same embedding as of the pixels that they were made of."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from encoder.errors import ImageError
from encoder.model import Encoder
from encoder.patches import PatchRows, joined
from encoder.preprocess import Pixels, preprocess
from encoder.sizing import num_tokens


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder.load("moonvit-tiny")


def picture(seed: int, *shape: int) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (*shape, 3), np.uint8)


def as_rows(encoder: Encoder, pixels: Pixels) -> PatchRows:
    rows, grid = preprocess(pixels, encoder.processor)
    mean = torch.tensor(encoder.processor.image_mean).view(1, 3, 1, 1)
    std = torch.tensor(encoder.processor.image_std).view(1, 3, 1, 1)
    values = (torch.from_numpy(rows).float() / 255 - mean) / std
    return PatchRows(values.flatten(1).to(encoder.dtype), grid)


def encoded(encoder: Encoder, items: list[Pixels | PatchRows], grids: list[tuple[int, int, int]]) -> list[torch.Tensor]:
    tokens = [num_tokens(grid, encoder.config.merge_size) for grid in grids]
    outs = [torch.empty(count, encoder.config.text_width, dtype=encoder.dtype) for count in tokens]
    assert all(encoder.encode(items, outs))
    return outs


def test_rows_and_pixels_in_one_pack(encoder: Encoder) -> None:
    pixels = [picture(1, 56, 84), picture(2, 2, 70, 42), picture(3, 28, 28), picture(4, 100, 30)]
    rows = [as_rows(encoder, item) for item in pixels]
    grids = [item.grid for item in rows]
    expected = encoded(encoder, list(pixels), grids)
    for mix in ([rows[0], pixels[1], rows[2], rows[3]], [pixels[0], rows[1], pixels[2], pixels[3]], list(rows)):
        for ours, theirs in zip(encoded(encoder, mix, grids), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_rows_that_lie_end_to_end_are_not_copied() -> None:
    whole = torch.arange(60.0).view(10, 6)
    assert joined([whole[:3], whole[3:4], whole[4:]]).data_ptr() == whole.data_ptr()
    torch.testing.assert_close(joined([whole[:3], whole[3:4], whole[4:]]), whole)
    torch.testing.assert_close(joined([whole[4:], whole[:4]]), torch.cat([whole[4:], whole[:4]]))
    torch.testing.assert_close(joined([whole[:3], whole[4:]]), torch.cat([whole[:3], whole[4:]]))
    other = torch.ones(2, 6)
    torch.testing.assert_close(joined([whole, other]), torch.cat([whole, other]))


def test_rows_that_do_not_fit_are_refused(encoder: Encoder) -> None:
    good = as_rows(encoder, picture(1, 56, 84))
    out = torch.empty(num_tokens(good.grid, 2), encoder.config.text_width)
    t, h, w = good.grid
    for bad in (
        PatchRows(good.rows[:-1], good.grid),
        PatchRows(good.rows[:, :-1], good.grid),
        PatchRows(good.rows.double(), good.grid),
        PatchRows(good.rows, (t, h, w + 2)),
        PatchRows(good.rows, (99, h, w)),
        PatchRows(good.rows, (t, h * w, 1)),
    ):
        with pytest.raises(ImageError, match="grid"):
            encoder.encode([bad], [out])
    with pytest.raises(ImageError, match="patch rows of grid"):
        encoder.encode([good], [out[:-1]])
