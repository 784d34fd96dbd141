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


def preprocess(image: Pixels, processor: ProcessorConfig, out: Pixels | None = None) -> tuple[Pixels, Grid]:
    """Return an image's patch rows, uint8 `[h * w, 3, patch, patch]` in raster order, and its grid.

    `image` is uint8 `[height, width, 3]`, RGB, only read. Given `out` of the rows' shape and C-contiguous, the rows
    are written there and it is returned; otherwise the caller owns a new array. Raises `ImageError` if the image or
    `out` has another dtype or shape.
    """
    width, height = image_size(image)
    grid = grid_thw(width, height, processor)
    patch = processor.patch_size
    shape = (num_patches(grid), 3, patch, patch)
    rows = np.empty(shape, np.uint8) if out is None else out
    if rows.shape != shape or rows.dtype != np.uint8 or not rows.flags.c_contiguous:
        raise ImageError(f"out must be C-contiguous uint8 of shape {shape}, got {rows.dtype} {rows.shape}")
    _patchify(resize(image, *resized_size(width, height, processor)), rows, grid, patch)
    return rows, grid


def image_size(image: Pixels) -> tuple[int, int]:
    """Return an image's width and height in pixels. Raises `ImageError` unless it is uint8 `[height, width, 3]`."""
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ImageError(f"an image must be uint8 of shape [height, width, 3], got {image.dtype} {image.shape}")
    return image.shape[1], image.shape[0]


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


def _patchify(image: Pixels, rows: Pixels, grid: Grid, patch: int) -> None:
    _, grid_height, grid_width = grid
    tiles = rows.reshape(grid_height, grid_width, 3, patch, patch)
    padded = _pad(image, grid_height * patch, grid_width * patch)
    tiles[...] = padded.reshape(grid_height, patch, grid_width, patch, 3).transpose(0, 2, 4, 1, 3)


def _pad(image: Pixels, height: int, width: int) -> Pixels:
    if image.shape == (height, width, 3):
        return image
    padded = np.zeros((height, width, 3), np.uint8)
    padded[: image.shape[0], : image.shape[1]] = image
    return padded
