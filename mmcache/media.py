"""What an item is: the client's half describes it, the decoder's half turns the description back into RGB pixels.

An item travels as (kind, header, raw): `kind` is `image` (an encoded file, empty header), `array` (uint8 H×W×3) or
`pil` (a PIL image); `header` is canonical JSON of everything besides the raw bytes that decides the pixels. The content
key covers all three.
"""

from __future__ import annotations

import base64
import io
import json
import os
import stat
import struct
import sys
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mmcache.errors import ImageTooLarge, UndecodableImage, UnreadableItem, UnsupportedItem, UnsupportedMode

if TYPE_CHECKING:
    from PIL import Image

IMAGE, ARRAY, PIL = "image", "array", "pil"

FORMATS = ("AVIF", "BMP", "DIB", "GIF", "ICO", "JPEG", "JPEG2000", "PCX", "PNG", "PPM", "TGA", "TIFF", "WEBP")
"""Formats that are decoded. Those that run other programs or scripts (EPS, WMF) are left out on purpose."""

DAMAGE = (OSError, SyntaxError, ValueError, TypeError, IndexError, EOFError, OverflowError, struct.error, zlib.error)
"""What Pillow raises on damaged files. Anything else ends the decoder, which costs this item alone."""

ALPHA_MODES = frozenset({"LA", "La", "PA", "RGBA", "RGBa"})
OPAQUE_MODES = frozenset({"1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "HSV"})


@dataclass(frozen=True, slots=True)
class Media:
    """One item as the client describes it. `raw` is the user's own memory where that is possible."""

    kind: str
    header: bytes
    raw: bytes | memoryview
    nbytes: int
    source: str


def describe(item: object, index: int, max_bytes: int) -> Media:
    """Describe one item: `bytes`, a path, a PIL image, or a uint8 array or tensor of shape H×W×3. Reads paths.

    Raises:
        UnreadableItem, UnsupportedItem, UnsupportedMode, UndecodableImage, ImageTooLarge: with `index` and the source.
    """
    if isinstance(item, bytes | bytearray | memoryview):
        return _described_bytes(bytes(item), index, max_bytes)
    if isinstance(item, str | os.PathLike):
        return _described_path(item, index, max_bytes)
    if isinstance(item, np.ndarray):
        return _described_array(item, "array", index, max_bytes)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(item, torch.Tensor):
        return _described_tensor(item, index, max_bytes)
    pil = sys.modules.get("PIL.Image")
    if pil is not None and isinstance(item, pil.Image):
        return _described_pil(item, index, max_bytes)
    raise UnsupportedItem(
        f"{type(item).__name__} is not an item: give bytes, a path, a PIL image, or a uint8 H×W×3 array or tensor",
        index=index,
    )


def _bounded(nbytes: int, index: int, source: str, max_bytes: int) -> None:
    if nbytes > max_bytes:
        raise ImageTooLarge(f"{nbytes} bytes, the limit is {max_bytes} (max_item_bytes)", index=index, source=source)
    if nbytes == 0:
        raise UndecodableImage("empty: 0 bytes", index=index, source=source)


def _described_bytes(raw: bytes, index: int, max_bytes: int) -> Media:
    _bounded(len(raw), index, "bytes", max_bytes)
    return Media(IMAGE, b"", raw, len(raw), "bytes")


def _described_path(item: str | os.PathLike[str], index: int, max_bytes: int) -> Media:
    source = os.fspath(item)
    try:
        # Not blocking: a named pipe must not hang the open.
        fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb", buffering=0) as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                what = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
                raise UnreadableItem(f"{what}; give the path of an image file", index=index, source=source)
            _bounded(status.st_size, index, source, max_bytes)
            raw = file.readall()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        hint = "; URLs are not fetched, read them first" if "://" in source[:16] else ""
        raise UnreadableItem(f"cannot be read: {reason}{hint}", index=index, source=source) from error
    _bounded(len(raw), index, source, max_bytes)
    return Media(IMAGE, b"", raw, len(raw), source)


def _described_array(array: np.ndarray[Any, Any], what: str, index: int, max_bytes: int) -> Media:
    shape = "×".join(map(str, array.shape)) or "()"
    source = f"{what} {shape} {array.dtype}"
    if array.dtype != np.uint8:
        raise UnsupportedItem(
            "pixels must be uint8, 0 to 255; convert floats of 0 to 1 by (x * 255).round().astype('uint8')",
            index=index,
            source=source,
        )
    if array.ndim != 3 or array.shape[2] != 3 or 0 in array.shape:
        chw = array.ndim == 3 and array.shape[0] == 3
        hint = ": this looks like 3×H×W, move the channels last" if chw else ""
        raise UnsupportedItem(f"pixels must have the shape H×W×3{hint}", index=index, source=source)
    _bounded(array.nbytes, index, source, max_bytes)
    header = b'{"dtype":"uint8","shape":[%d,%d,3]}' % array.shape[:2]
    contiguous = np.ascontiguousarray(array)
    return Media(ARRAY, header, contiguous.data.cast("B"), contiguous.nbytes, source)


def _described_tensor(tensor: Any, index: int, max_bytes: int) -> Media:
    if tensor.device.type != "cpu" or tensor.layout != sys.modules["torch"].strided:
        source = f"tensor on {tensor.device}"
        raise UnsupportedItem("tensors must be dense and on the CPU; call .cpu() first", index=index, source=source)
    if tensor.dtype != sys.modules["torch"].uint8:
        source = f"tensor {'×'.join(map(str, tensor.shape))} {tensor.dtype}"
        raise UnsupportedItem(
            "pixels must be uint8, 0 to 255; convert floats of 0 to 1 by (x * 255).round().to(torch.uint8)",
            index=index,
            source=source,
        )
    return _described_array(tensor.numpy(), "tensor", index, max_bytes)


def _described_pil(image: Image.Image, index: int, max_bytes: int) -> Media:
    source = f"PIL image {image.width}×{image.height} {image.mode}"
    _check_mode(image.mode, index, source)
    try:
        raw = image.tobytes()
    except (OSError, SyntaxError, ValueError) as error:
        raise UndecodableImage(f"Pillow cannot load it: {error}", index=index, source=source) from error
    _bounded(len(raw), index, source, max_bytes)
    fields: dict[str, object] = {"mode": image.mode, "size": [image.width, image.height]}
    if image.mode in ("P", "PA") and image.palette is not None:
        mode = image.palette.mode
        fields["palette"] = [mode, _text(bytes(image.getpalette(mode) or ()))]
    transparency = image.info.get("transparency")
    if isinstance(transparency, bytes):
        fields["transparency"] = _text(transparency)
    elif transparency is not None:
        fields["transparency"] = list(transparency) if isinstance(transparency, tuple) else transparency
    return Media(PIL, _canonical(fields), raw, len(raw), source)


def _canonical(fields: dict[str, object]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _check_mode(mode: str, index: int | None = None, source: str = "") -> None:
    if mode not in ALPHA_MODES and mode not in OPAQUE_MODES:
        known = ", ".join(sorted(ALPHA_MODES | OPAQUE_MODES))
        raise UnsupportedMode(
            f"mode {mode!r} has no conversion to RGB here (known: {known})", index=index, source=source
        )


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
            self._image = _opened_image(raw) if kind == IMAGE else _rebuilt_pil(header, raw)
            self.width, self.height = self._image.size
        else:
            raise UnsupportedItem(f"unknown kind of item {kind!r}")
        if self.width * self.height > max_pixels:
            size = f"{self.width}×{self.height}"
            raise ImageTooLarge(f"{size} is {self.width * self.height} pixels, the limit is {max_pixels} (max_pixels)")
        if self._image is not None:
            _check_mode(self._image.mode)

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
                rgb = to_rgb(self._image)
            except Exception as error:
                raise UndecodableImage(f"truncated or damaged: {error}") from error
            np.copyto(pixels, np.asarray(rgb))


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert to RGB; transparency is composited on white."""
    from PIL import Image

    if image.mode in ALPHA_MODES or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


def _opened_array(header: bytes, raw: memoryview) -> np.ndarray[Any, Any]:
    shape = json.loads(header)["shape"]
    if len(shape) != 3 or shape[2] != 3 or shape[0] * shape[1] * 3 != raw.nbytes:
        raise UnsupportedItem(f"array header {shape} does not match {raw.nbytes} bytes")
    return np.frombuffer(raw, np.uint8).reshape(shape)


def _opened_image(raw: memoryview) -> Image.Image:
    from PIL import Image

    # The limit of pixels is the caller's, checked from the header; Pillow's own would warn or raise at another number.
    Image.MAX_IMAGE_PIXELS = None
    Image.init()
    try:
        return Image.open(io.BytesIO(raw), formats=FORMATS)
    except Exception as error:
        known = ", ".join(FORMATS)
        raise UndecodableImage(f"not a picture, or its header is broken (known formats: {known})") from error


def _rebuilt_pil(header: bytes, raw: memoryview) -> Image.Image:
    from PIL import Image

    fields = json.loads(header)
    try:
        image = Image.frombytes(fields["mode"], tuple(fields["size"]), bytes(raw))
        if "palette" in fields:
            mode, palette = fields["palette"]
            image.putpalette(base64.b64decode(palette), mode)
        transparency = fields.get("transparency")
        if isinstance(transparency, str):
            transparency = base64.b64decode(transparency)
        elif isinstance(transparency, list):
            transparency = tuple(transparency)
        if transparency is not None:
            image.info["transparency"] = transparency
    except (ValueError, KeyError, TypeError) as error:
        raise UndecodableImage(f"PIL header does not match its bytes: {error}") from error
    return image
