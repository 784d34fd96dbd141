"""How big an image becomes, in pixels, patches and tokens ("NaViT resize"). Free of torch and numpy.

Source of the formula: the processor of the Kimi-K2.5 repository. Padding comes after the limits, so an item may
exceed `max_patches`; room is reserved by what these functions return, never by the limits.
"""

import math
from typing import TypeAlias

from encoder.config import ProcessorConfig
from encoder.errors import ImageError

Grid: TypeAlias = tuple[int, int, int]
"""Patches of one item in time, height and width, before merging."""


def resized_size(width: int, height: int, processor: ProcessorConfig) -> tuple[int, int]:
    """Return the (width, height) in pixels to which an image is resized before padding.

    Never larger than the image. Raises `ImageError` if a side is not positive.
    """
    if width < 1 or height < 1:
        raise ImageError(f"image of {width}x{height} pixels: both sides must be at least 1")
    patch, side = processor.patch_size, processor.max_side
    whole_patches = max(1, width // patch) * max(1, height // patch)
    scale = min(1.0, math.sqrt(processor.max_patches / whole_patches), side / width, side / height)
    return _clamp(int(width * scale), side), _clamp(int(height * scale), side)


def grid_thw(width: int, height: int, processor: ProcessorConfig) -> Grid:
    """Return the patches in time (1), height and width of an image of that many pixels, padding included."""
    new_width, new_height = resized_size(width, height, processor)
    return 1, _padded_patches(new_height, processor), _padded_patches(new_width, processor)


def num_patches(grid: Grid) -> int:
    """Return the rows that an item takes in a packed sequence."""
    time, height, width = grid
    return time * height * width


def num_tokens(grid: Grid, merge_size: int) -> int:
    """Return the rows of an item's embedding. Time is pooled away, so frames do not count."""
    _, height, width = grid
    return (height // merge_size) * (width // merge_size)


def _clamp(pixels: int, side: int) -> int:
    return min(max(pixels, 1), side)


def _padded_patches(pixels: int, processor: ProcessorConfig) -> int:
    return math.ceil(pixels / processor.tile) * processor.merge_size
