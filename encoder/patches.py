"""Patch rows that are normalised already: items that skip resizing, padding and normalising."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from encoder.config import EncoderConfig
from encoder.errors import ImageError
from encoder.sizing import Grid, num_patches


@dataclass(frozen=True, slots=True)
class PatchRows:
    """An item as a processor of one's own made it.

    `rows`: `[t · h · w, 3 · patch²]`, a row's values by channel, then y, then x; in the encoder's dtype and on its
    device, only read. Rows are in raster order, frame after frame. `grid`: patches in time, height and width.
    """

    rows: torch.Tensor
    grid: Grid


def check_rows(item: PatchRows, config: EncoderConfig, dtype: torch.dtype, device: torch.device) -> Grid:
    """Return an item's grid. Raises `ImageError` if its rows are not as described, or not as many as its grid has."""
    rows, shape = item.rows, (num_patches(item.grid), 3 * config.patch_size**2)
    if tuple(rows.shape) != shape or rows.dtype != dtype or rows.device != device or not rows.is_contiguous():
        raise ImageError(
            f"patch rows of grid {item.grid} must be contiguous {dtype} {list(shape)} on {device}, "
            f"got {rows.dtype} {list(rows.shape)} on {rows.device}"
        )
    return item.grid


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the parts end to end: where they lie so in memory already, without a copy."""
    first = parts[0]
    if len(parts) == 1:
        return first
    end = first.data_ptr()
    for part in parts:
        if part.data_ptr() != end or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return torch.cat(list(parts))
        end += part.numel() * part.element_size()
    num_rows = sum(len(part) for part in parts)
    return first.as_strided((num_rows, first.shape[1]), first.stride())
