"""Encoded files and PIL images: opened without decoding them, then decoded to RGB as the reference does."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from mmcache.errors import ImageTooLarge, UndecodableImage, UnsupportedMode
from mmcache.images.avif_exif import check_avif
from mmcache.images.bounds import check_size
from mmcache.images.comments import check_gif, check_pnm
from mmcache.images.complaints import refused_complaints
from mmcache.images.jpeg_segments import check_jpeg, check_jpeg_length
from mmcache.images.orientation import TURNS, UNDONE, UPRIGHT, read_orientation
from mmcache.images.tiff_directory import check_directory
from mmcache.images.unidentified import unidentified
from mmcache.media import ALPHA_MODES, DAMAGE, PilHeader, check_mode, pil_nbytes

__all__ = ["FORMATS", "Picture", "check_size", "open_file", "rebuild_pil", "to_rgb"]

FORMATS = ("AVIF", "BMP", "DIB", "GIF", "ICO", "JPEG", "JPEG2000", "PCX", "PNG", "PPM", "TGA", "TIFF", "WEBP")
"""Formats that are decoded. Those that run other programs or scripts (EPS, WMF) are left out on purpose."""

_SIDES = (256, 257)
_TILE_SIDES = (322, 323)
_PCX_PALETTE_BYTES = 769
_PCX_GRAY = b"\2\0"


class Picture:
    """A picture whose size is known and whose pixels are not decoded yet.

    Attributes:
        width, height: of the pixels that `fill` gives.
    """

    def __init__(self, image: Image.Image, size: tuple[int, int], turn: Image.Transpose | None = None) -> None:
        """Of `size` once `turn` is done, if there is one, to what Pillow decodes."""
        self._image = image
        self._turn = turn
        self.width, self.height = size

    def fill(self, pixels: np.ndarray[Any, Any]) -> None:
        """Decode into `pixels`, uint8 `[height, width, 3]`.

        Raises:
            UndecodableImage: truncated or damaged.
            UnsupportedMode: this Pillow lacks the library that its mode needs.
        """
        try:
            with _pillow_limit(None), self._complaints():  # the header was checked; it gives no more than it promised
                rgb = to_rgb(self._image)
                rgb = rgb if self._turn is None else rgb.transpose(self._turn)
        except (*DAMAGE, Image.DecompressionBombError) as error:
            raise UndecodableImage(f"truncated or damaged: {error}") from error
        except ImportError as error:
            raise UnsupportedMode(f"mode {self._image.mode!r} cannot be converted by this Pillow: {error}") from error
        if rgb.size != (self.width, self.height):
            promised = f"{self.width}×{self.height}"
            raise UndecodableImage(f"damaged: its header says {promised}, its pixels are {rgb.width}×{rgb.height}")
        np.copyto(pixels, np.asarray(rgb))

    def _complaints(self) -> AbstractContextManager[None]:
        """libtiff goes on after damage, with pixels of its own making; all that it says of it goes to stderr."""
        return refused_complaints() if self._image.format == "TIFF" else nullcontext()


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert to RGB; transparency is composited on white."""
    image.load()
    check_mode(image.mode)
    if image.mode == "La":
        image = image.convert("LA")
    if image.mode in ALPHA_MODES or image.info.get("transparency") is not None:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


def open_file(raw: memoryview, max_pixels: int, orientation: str) -> Picture:
    """Open an encoded file: its header is read and bounded, its first frame is what gets decoded.

    Args:
        raw: the whole file.
        max_pixels: refuse pictures of more.
        orientation: "exif" to turn it as its EXIF orientation says, "ignore" to leave it as it is stored.

    Raises:
        UndecodableImage, ImageTooLarge, UnsupportedMode: see docs/decoding.md.
    """
    with _pillow_limit(max_pixels):
        image = _opened(raw, max_pixels)
        width, height = _stored_size(image)
        check_size(width, height, max_pixels)
        check_jpeg_length(raw)
        check_mode(image.mode)
        is_tiff = image.format == "TIFF"
        number = read_orientation(image, raw) if is_tiff or orientation == "exif" else UPRIGHT
    if is_tiff:  # Pillow turns these by itself
        _check_tiles(image, max_pixels)
        turn = None if orientation == "exif" else UNDONE.get(number)
    else:
        turn = TURNS.get(number)
    is_swapped = orientation == "exif" and number >= 5
    return Picture(image, (height, width) if is_swapped else (width, height), turn)


def rebuild_pil(fields: PilHeader, raw: memoryview, max_pixels: int) -> Picture:
    """Make a PIL image again from its description. It is taken as it stands: never turned.

    Raises:
        UndecodableImage, ImageTooLarge, UnsupportedMode: bytes and description do not match, or break a limit.
    """
    check_mode(fields.mode)
    width, height = fields.size
    check_size(width, height, max_pixels)
    if raw.nbytes != pil_nbytes(fields.mode, fields.size):
        raise UndecodableImage(f"{raw.nbytes} bytes are not a PIL image of {width}×{height} in mode {fields.mode}")
    try:
        image = Image.frombytes(fields.mode, fields.size, bytes(raw))
        if fields.palette is not None:
            image.putpalette(fields.palette, fields.palette_mode or "RGB")
    except DAMAGE as error:
        raise UndecodableImage(f"the header of a PIL image does not match its bytes: {error}") from error
    if fields.transparency is not None:
        image.info["transparency"] = fields.transparency
    return Picture(image, fields.size)


def _opened(raw: memoryview, max_pixels: int) -> Image.Image:
    check_directory(raw)
    check_jpeg(raw)
    check_avif(raw)
    check_gif(raw)
    check_pnm(raw)
    _check_pcx(raw)
    Image.init()
    try:
        image = Image.open(io.BytesIO(raw), formats=[name for name in FORMATS if name in Image.OPEN])
    except Image.DecompressionBombError as error:
        size = str(error).partition(" exceeds")[0]
        raise ImageTooLarge(f"{size}, the limit is {max_pixels} (max_pixels)") from error
    except UnidentifiedImageError as error:
        raise unidentified(raw, FORMATS) from error
    except DAMAGE as error:
        raise UndecodableImage(f"its header is broken: {error}") from error
    _cut_palette(image, raw)
    return image


def _stored_size(image: Image.Image) -> tuple[int, int]:
    if image.format != "TIFF":
        return image.size
    width, height = (image.tag_v2[tag] for tag in _SIDES)  # type: ignore[attr-defined]  # `size` is that after turning
    return width, height


def _check_tiles(image: Image.Image, max_pixels: int) -> None:
    """A TIFF's tiles are decoded whole, however small the picture is."""
    tags = image.tag_v2  # type: ignore[attr-defined]
    width, height = (tags.get(tag, 1) for tag in _TILE_SIDES)
    if not isinstance(width, int) or not isinstance(height, int):
        raise UndecodableImage("its header is broken: the sides of its tiles are not numbers")
    if width * height > max_pixels:
        raise ImageTooLarge(f"tiles of {width}×{height}, the limit is {max_pixels} pixels (max_pixels)")


def _check_pcx(raw: memoryview) -> None:
    """The palette of a PCX comes last: without it Pillow takes the picture for a gray one."""
    has_palette = _has_palette_last(bytes(raw[:70]))
    if has_palette and bytes(raw[-_PCX_PALETTE_BYTES:][:1]) != b"\x0c":
        raise UndecodableImage("truncated: a PCX of 8 bits and one plane ends with its palette")


def _has_palette_last(head: bytes) -> bool:
    return len(head) == 70 and (head[0], head[1], head[3], head[65]) == (10, 5, 8, 1) and head[68:] != _PCX_GRAY


def _cut_palette(image: Image.Image, raw: memoryview) -> None:
    """The pixels of a PCX end before its palette. Where they do not, it is cut, and the palette is a part of them."""
    if image.format == "PCX" and _has_palette_last(bytes(raw[:70])):
        image.fp = io.BytesIO(raw[:-_PCX_PALETTE_BYTES])  # type: ignore[attr-defined]


@contextmanager
def _pillow_limit(max_pixels: int | None) -> Iterator[None]:
    """Pillow with a limit of pixels, and without its warnings on damaged metadata: they would fill the log.

    Some formats hold pictures of another size than their header says (ICO), which Pillow decodes while it opens them.
    """
    before = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = None if max_pixels is None else max_pixels // 2 + 1  # it raises above twice that
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        Image.MAX_IMAGE_PIXELS = before
