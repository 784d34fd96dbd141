"""Patch rows that an engine's own processor made: normalised already, with their grid."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from mmcache.array_checks import checked_grid
from mmcache.errors import ImageTooLarge, UnsupportedItem
from mmcache.media import CanonicalHeader, Media, Side

if TYPE_CHECKING:
    import torch

PATCHES = "patches"
ROW_TYPES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Types of values, with their bytes."""

GridSide = Annotated[int, Field(ge=1, lt=1 << 16)]


class PatchHeader(CanonicalHeader):
    """Header of `patches`. `shape`: rows, values of a row (channel, then y, then x)."""

    dtype: Literal["float32", "float16", "bfloat16"]
    shape: tuple[Side, Side]
    grid: tuple[GridSide, GridSide, GridSide]

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return self.shape[0] * self.shape[1] * ROW_TYPES[self.dtype]


def describe_patches(
    item: np.ndarray[Any, Any] | torch.Tensor, grid: Sequence[int], index: int, max_bytes: int
) -> Media:
    """Describe patch rows `[t·h·w, 3, patch, patch]` or `[t·h·w, 3·patch²]`, of any memory layout.

    Raises:
        UnsupportedItem, ImageTooLarge: with `index` and the source.
    """
    dtype = str(getattr(item, "dtype", type(item).__name__)).removeprefix("torch.")
    shape = tuple(getattr(item, "shape", ()))
    source = f"patches {'×'.join(map(str, shape))} {dtype}"
    if dtype not in ROW_TYPES or len(shape) not in (2, 4) or 0 in shape:
        reason = "patch rows are float32, float16 or bfloat16, [t·h·w, 3, patch, patch] or [t·h·w, 3·patch²]"
        raise UnsupportedItem(reason, index=index, source=source)
    try:
        grid = checked_grid(grid)
    except ValueError as error:
        raise UnsupportedItem(str(error), index=index, source=source) from None
    if any(not 1 <= side < 1 << 16 for side in grid):
        raise UnsupportedItem(f"grid must be 1 to 65535 patches a side, got {grid}", index=index, source=source)
    if grid[0] * grid[1] * grid[2] != shape[0]:
        raise UnsupportedItem(f"a grid of {grid} has {grid[0] * grid[1] * grid[2]} rows", index=index, source=source)
    if (nbytes := math.prod(shape) * ROW_TYPES[dtype]) > max_bytes:
        limit = f"{nbytes} bytes, the limit is {max_bytes} (max_item_bytes)"
        raise ImageTooLarge(limit, index=index, source=source)
    header = PatchHeader(dtype=dtype, shape=(shape[0], math.prod(shape[1:])), grid=grid)  # type: ignore[arg-type]
    return Media(PATCHES, header.canonical(), _bytes_of(item, index, source), header.nbytes, source)


def _bytes_of(item: Any, index: int, source: str) -> memoryview:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(item, torch.Tensor):
        if item.device.type != "cpu" or item.layout != torch.strided or item.is_nested:
            raise UnsupportedItem("tensors must be dense and on the CPU; call .cpu() first", index=index, source=source)
        item = item.detach().resolve_conj().resolve_neg().contiguous().view(torch.uint8).numpy()
    return np.ascontiguousarray(item).reshape(-1).view(np.uint8).data
