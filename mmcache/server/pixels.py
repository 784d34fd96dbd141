"""The decoder's half of an item: from its description and raw bytes to RGB pixels."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from pydantic import ValidationError

from mmcache.errors import ImageTooLarge, UndecodableImage, UnsupportedItem
from mmcache.media import ALPHA_MODES, ARRAY, IMAGE, PIL, ArrayHeader, PilHeader, check_mode

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("AVIF", "BMP", "DIB", "GIF", "ICO", "JPEG", "JPEG2000", "PCX", "PNG", "PPM", "TGA", "TIFF", "WEBP")
"""Formats that are decoded. Those that run other programs or scripts (EPS, WMF) are left out on purpose."""

DAMAGE = (
    OSError, SyntaxError, ValueError, TypeError, LookupError, EOFError, ArithmeticError, RuntimeError, MemoryError,
    struct.error, zlib.error,
)  # fmt: skip
"""What Pillow raises on damaged files. Anything else ends the decoder, which costs this item alone."""

BYTES_A_PIXEL = {"L": 1, "P": 1, "LA": 2, "La": 2, "PA": 2, "RGB": 3, "YCbCr": 3, "HSV": 3}
"""In a PIL image's raw bytes, by mode; 4 for the other modes, and a bit for mode 1, its rows in whole bytes."""

H = TypeVar("H", ArrayHeader, PilHeader)


class OpenedMedia:
    """The decoder's half: an item whose size is known and whose pixels are not decoded yet.

    Raises (constructor):
        UndecodableImage, UnsupportedMode, ImageTooLarge, UnsupportedItem: without an index; the client adds it.
    """

    def __init__(self, kind: str, header: bytes, raw: memoryview, max_pixels: int) -> None:
        self._array: np.ndarray[Any, Any] | None = None
        self._image: Image.Image | None = None
        if kind == ARRAY:
            self._array = _opened_array(header, raw)
            self.height, self.width = self._array.shape[:2]
        elif kind in (IMAGE, PIL):
            self._image = _opened_image(raw, max_pixels) if kind == IMAGE else _rebuilt_pil(header, raw, max_pixels)
            self.width, self.height = self._image.size
        else:
            raise UnsupportedItem(f"unknown kind of item {kind!r}")
        _check_size(self.width, self.height, max_pixels)
        if self._image is not None:
            check_mode(self._image.mode)

    @property
    def nbytes(self) -> int:
        """Bytes of the RGB pixels."""
        return int(self.width * self.height * 3)

    def fill(self, pixels: np.ndarray[Any, Any]) -> None:
        """Decode into `pixels`, uint8 `[height, width, 3]`.

        Raises:
            UndecodableImage: truncated or damaged.
        """
        if self._array is not None:
            np.copyto(pixels, self._array)
        elif self._image is not None:
            try:
                np.copyto(pixels, np.asarray(to_rgb(self._image)))
            except DAMAGE as error:
                raise UndecodableImage(f"truncated or damaged: {error}") from error


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        reason = f"{width}×{height} is {width * height} pixels, the limit is {max_pixels} (max_pixels)"
        raise ImageTooLarge(reason)


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert to RGB; transparency is composited on white."""
    from PIL import Image

    if image.mode == "La":
        image = image.convert("LA")
    if image.mode in ALPHA_MODES or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


def _parsed(model: type[H], header: bytes) -> H:
    try:
        return model.model_validate_json(header)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise UnsupportedItem(f"bad {model.__name__}: {first['loc']}: {first['msg']}") from error


def _opened_array(header: bytes, raw: memoryview) -> np.ndarray[Any, Any]:
    shape = _parsed(ArrayHeader, header).shape
    if shape[0] * shape[1] * 3 != raw.nbytes:
        raise UnsupportedItem(f"an array of shape {shape} does not fill {raw.nbytes} bytes")
    return np.frombuffer(raw, np.uint8).reshape(shape)


def _opened_image(raw: memoryview, max_pixels: int) -> Image.Image:
    from PIL import Image

    # Some formats hold pictures of another size than their header says (ICO), which Pillow decodes while it opens them.
    # Pillow warns above its own limit and raises above twice that.
    Image.MAX_IMAGE_PIXELS = max_pixels // 2 + 1
    Image.init()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return Image.open(io.BytesIO(raw), formats=[name for name in FORMATS if name in Image.OPEN])
    except Image.DecompressionBombError as error:
        raise ImageTooLarge(f"{error}; the limit is {max_pixels} pixels (max_pixels)") from error
    except DAMAGE as error:
        known = ", ".join(FORMATS)
        raise UndecodableImage(f"not a picture, or its header is broken (known formats: {known})") from error


def _rebuilt_pil(header: bytes, raw: memoryview, max_pixels: int) -> Image.Image:
    from PIL import Image

    fields = _parsed(PilHeader, header)
    check_mode(fields.mode)
    width, height = fields.size
    _check_size(width, height, max_pixels)
    row = -(-width // 8) if fields.mode == "1" else width * BYTES_A_PIXEL.get(fields.mode, 4)
    if raw.nbytes != row * height:
        raise UndecodableImage(f"{raw.nbytes} bytes are not a PIL image of {width}×{height} in mode {fields.mode}")
    try:
        image = Image.frombytes(fields.mode, fields.size, bytes(raw))
        if fields.palette is not None:
            image.putpalette(fields.palette, fields.palette_mode or "RGB")
    except DAMAGE as error:
        raise UndecodableImage(f"the header of a PIL image does not match its bytes: {error}") from error
    if fields.transparency is not None:
        image.info["transparency"] = fields.transparency
    return image
