"""What a staged item says that it is, held against its size, the limits and the model that is served."""

from __future__ import annotations

import math

from pydantic import ValidationError

from encoder.config import ProcessorConfig
from encoder.errors import ImageError
from encoder.sizing import Grid, grid_thw
from mmcache.errors import UnsupportedItem
from mmcache.media import ARRAY, ArrayHeader
from mmcache.patches import PATCHES, PatchHeader
from mmcache.server.array_sizes import array_bytes, sides
from mmcache.server.grids import grid_fault


def checked_header(kind: str, header: bytes, nbytes: int, max_pixels: int, processor: ProcessorConfig) -> None:
    """Check what is to be staged, before there is room for it.

    Raises:
        UnsupportedItem, ImageTooLarge: the header is none, breaks a limit, says another size, or the model takes no
            such item.
    """
    try:
        expected = array_bytes(header, max_pixels)[1] if kind == ARRAY else _patch_bytes(kind, header)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise UnsupportedItem(f"its header is none of {kind!r}: {first['loc']}: {first['msg']}") from error
    if expected != nbytes:
        raise UnsupportedItem(f"its header says {expected} bytes, it asks for {nbytes}")
    staged_grid(kind, header, processor)


def staged_grid(kind: str, header: bytes, processor: ProcessorConfig) -> Grid:
    """Patches in time, height and width of an item whose header was checked, maybe under another model.

    Raises:
        UnsupportedItem: this model does not take it.
    """
    if kind == ARRAY:
        height, width, num_frames = sides(ArrayHeader.model_validate_json(header).shape)
        try:
            return grid_thw(width, height, processor, num_frames)
        except ImageError as error:
            raise UnsupportedItem(str(error)) from error
    rows = PatchHeader.model_validate_json(header)
    if rows.shape[1] != (expected := 3 * processor.patch_size**2):
        raise UnsupportedItem(f"a patch of this model has {expected} values, these rows have {rows.shape[1]}")
    if fault := grid_fault(rows.grid, processor):
        raise UnsupportedItem(f"this model takes no grid of {'×'.join(map(str, rows.grid))}: {fault}")
    return rows.grid


def _patch_bytes(kind: str, header: bytes) -> int:
    if kind != PATCHES:
        raise UnsupportedItem(f"items of kind {kind!r} are not staged")
    rows = PatchHeader.model_validate_json(header)
    if math.prod(rows.grid) != rows.shape[0]:
        raise UnsupportedItem(f"a grid of {rows.grid} has {math.prod(rows.grid)} rows, not {rows.shape[0]}")
    return rows.nbytes
