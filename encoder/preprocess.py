"""Pixels to patch rows on the CPU: resize, pad, patchify.

Resizing is Pillow's 8-bit bicubic with antialias, horizontally and then vertically, whatever order the installed
Pillow would choose itself. Rows stay uint8; normalising belongs to the encoder, on its device.
"""

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from encoder.config import ProcessorConfig
from encoder.errors import ImageError
from encoder.sizing import Grid, grid_thw, num_patches, resized_size

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels: TypeAlias = npt.NDArray[np.uint8]
"""RGB: an image `[height, width, 3]`, or a video chunk `[frames, height, width, 3]`."""


def preprocess(pixels: Pixels, processor: ProcessorConfig, out: Pixels | None = None) -> tuple[Pixels, Grid]:
    """Return an item's patch rows, uint8 `[t * h * w, 3, patch, patch]`, and its grid.

    `pixels` is an image or a chunk, uint8 of any memory layout, only read. Rows are in raster order, frame after
    frame; each frame is resized and padded by itself. Given `out` of the rows' shape and C-contiguous, the rows are
    written there and it is returned; otherwise the caller owns a new array. Raises `ImageError` if the pixels or
    `out` have another dtype or shape, or a chunk has too many frames.
    """
    grid = pixels_grid(pixels, processor)
    patch = processor.patch_size
    shape = (num_patches(grid), 3, patch, patch)
    rows = np.empty(shape, np.uint8) if out is None else out
    if rows.shape != shape or rows.dtype != np.uint8 or not rows.flags.c_contiguous:
        raise ImageError(f"out must be C-contiguous uint8 of shape {shape}, got {rows.dtype} {rows.shape}")
    width, height, num_frames = pixels_size(pixels)
    size = resized_size(width, height, processor, num_frames)
    frames = pixels if num_frames else pixels[None]
    for frame, tiles in zip(frames, rows.reshape(*grid, 3, patch, patch), strict=True):
        _patchify(resize(frame, *size), tiles)
    return rows, grid


def pixels_grid(pixels: Pixels, processor: ProcessorConfig) -> Grid:
    """Return an item's patches in time, height and width. Raises `ImageError` as `preprocess` does."""
    width, height, num_frames = pixels_size(pixels)
    return grid_thw(width, height, processor, num_frames)


def pixels_size(pixels: Pixels) -> tuple[int, int, int]:
    """Return an item's width and height in pixels and its number of frames, 0 for an image.

    Raises `ImageError` unless it is uint8 `[height, width, 3]`, or `[frames, height, width, 3]` with a frame.
    """
    if pixels.dtype != np.uint8 or pixels.ndim not in (3, 4) or pixels.shape[-1] != 3 or not len(pixels):
        raise ImageError(
            "an item must be uint8 of shape [height, width, 3], or [frames, height, width, 3] with one frame or more, "
            f"got {pixels.dtype} {pixels.shape}"
        )
    height, width = pixels.shape[-3:-1]
    return width, height, pixels.shape[0] if pixels.ndim == 4 else 0


def resize(image: Pixels, width: int, height: int) -> Pixels:
    """Return the image resized to `[height, width, 3]`; the image itself if no side changes.

    One call of Pillow per changed side: asked for both at once, newer versions sometimes take the vertical pass
    first, and the rounding between the passes then differs.
    """
    if (width, height) == (image.shape[1], image.shape[0]):
        return image
    picture = _resize_side(_picture(image), width, image.shape[0])
    picture = _resize_side(picture, width, height)
    return np.asarray(picture)


def _picture(image: Pixels) -> "Image":
    from PIL import Image

    return Image.fromarray(np.ascontiguousarray(image))


def _resize_side(picture: "Image", width: int, height: int) -> "Image":
    from PIL import Image

    if picture.size == (width, height):
        return picture
    return picture.resize((width, height), Image.Resampling.BICUBIC)


def _patchify(image: Pixels, tiles: Pixels) -> None:
    """Cut an image, padded right and bottom, into `tiles`: `[rows, columns, 3, patch, patch]`."""
    rows, columns, _, patch, _ = tiles.shape
    padded = _pad(image, rows * patch, columns * patch)
    tiles[...] = padded.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)


def _pad(image: Pixels, height: int, width: int) -> Pixels:
    if image.shape == (height, width, 3):
        return image
    padded = np.zeros((height, width, 3), np.uint8)
    padded[: image.shape[0], : image.shape[1]] = image
    return padded
