"""How big an item becomes, in pixels, patches and tokens ("NaViT resize"). Free of torch and numpy.

An item is an image, or a video chunk of a few frames. Both follow one rule under different limits: an image has at
most `max_patches`, each frame of a chunk at most `max_patches_per_frame`, a chunk of one frame too. Functions take
the number of frames, 0 for an image.

Source of the formula: the image and video processors of the Kimi-K2.5 repository. Padding comes after the limits, so
an item may exceed them; room is reserved by what these functions return, never by the limits.
"""

import math
from typing import TypeAlias

from encoder.config import ProcessorConfig
from encoder.errors import ImageError

Grid: TypeAlias = tuple[int, int, int]
"""Patches of one item in time, height and width, before merging."""


def resized_size(width: int, height: int, processor: ProcessorConfig, num_frames: int = 0) -> tuple[int, int]:
    """Return the (width, height) in pixels to which an image, or every frame of a chunk, is resized before padding.

    Never larger than it was. Raises `ImageError` if a side is not positive or a chunk has more frames than
    `frames_per_chunk`.
    """
    if width < 1 or height < 1:
        raise ImageError(f"image of {width}x{height} pixels: both sides must be at least 1")
    limit = _patch_limit(num_frames, processor)
    patch, side = processor.patch_size, processor.max_side
    whole_patches = max(1, width // patch) * max(1, height // patch)
    scale = min(1.0, math.sqrt(limit / whole_patches), side / width, side / height)
    return _clamp(int(width * scale), side), _clamp(int(height * scale), side)


def grid_thw(width: int, height: int, processor: ProcessorConfig, num_frames: int = 0) -> Grid:
    """Return the patches in time (1 for an image), height and width, padding included.

    Sides are those of the image or of one frame. Raises `ImageError` as `resized_size` does.
    """
    new_width, new_height = resized_size(width, height, processor, num_frames)
    return max(1, num_frames), _padded_patches(new_height, processor), _padded_patches(new_width, processor)


def num_patches(grid: Grid) -> int:
    """Return the rows that an item takes in a packed sequence."""
    time, height, width = grid
    return time * height * width


def num_tokens(grid: Grid, merge_size: int) -> int:
    """Return the rows of an item's embedding. Time is pooled away, so frames do not count."""
    _, height, width = grid
    return (height // merge_size) * (width // merge_size)


def _patch_limit(num_frames: int, processor: ProcessorConfig) -> int:
    most = processor.frames_per_chunk
    if not 0 <= num_frames <= most:
        raise ImageError(
            f"a chunk of {num_frames} frames, this model takes 1 to {most} (frames_per_chunk): give each "
            f"video[i : i + {most}] for i in range(0, len(video), {most}) as an item of its own"
        )
    return processor.max_patches_per_frame if num_frames else processor.max_patches


def _clamp(pixels: int, side: int) -> int:
    return min(max(pixels, 1), side)


def _padded_patches(pixels: int, processor: ProcessorConfig) -> int:
    return math.ceil(pixels / processor.tile) * processor.merge_size
