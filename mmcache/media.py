"""What an item is, as the client describes it. The decoder's half, which turns it into pixels, is server/pixels.py.

An item travels as (kind, header, raw): `kind` is `image` (an encoded file, empty header), `array` (uint8 H×W×3) or
`pil` (a PIL image); `header` is canonical JSON of everything besides the raw bytes that decides the pixels. The content
key covers all three.
"""

from __future__ import annotations

import os
import stat
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mmcache.errors import ImageTooLarge, UndecodableImage, UnreadableItem, UnsupportedItem, UnsupportedMode

if TYPE_CHECKING:
    from PIL import Image

IMAGE, ARRAY, PIL = "image", "array", "pil"

ALPHA_MODES = frozenset({"LA", "La", "PA", "RGBA", "RGBa"})
OPAQUE_MODES = frozenset({"1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "HSV"})


Side = Annotated[int, Field(ge=1, lt=1 << 31)]


class _Header(BaseModel):
    """Canonical: the fields in their order, no spaces, unset ones left out."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, ser_json_bytes="base64", val_json_bytes="base64"
    )

    def canonical(self) -> bytes:
        """The header's bytes; they are part of the key."""
        return self.model_dump_json(exclude_none=True).encode()


class ArrayHeader(_Header):
    """Header of an `array`."""

    dtype: Literal["uint8"] = "uint8"
    shape: tuple[Side, Side, Literal[3]]


class PilHeader(_Header):
    """Header of a `pil`: everything besides the pixels that decides the colours."""

    mode: Annotated[str, Field(max_length=8)]
    size: tuple[Side, Side]
    palette_mode: Annotated[str, Field(max_length=8)] | None = None
    palette: Annotated[bytes, Field(max_length=1024)] | None = None
    transparency: Annotated[bytes, Field(max_length=256)] | int | tuple[int, ...] | None = None


class Media(NamedTuple):
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
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                what = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
                raise UnreadableItem(f"{what}; give the path of an image file", index=index, source=source)
            _bounded(status.st_size, index, source, max_bytes)
            with open(fd, "rb", buffering=0, closefd=False) as file:
                raw = file.readall()
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        hint = "; URLs are not fetched, read them first" if "://" in source[:16] else ""
        raise UnreadableItem(f"cannot be read: {reason}{hint}", index=index, source=source) from error
    _bounded(len(raw), index, source, max_bytes)
    return Media(IMAGE, b"", raw, len(raw), source)


def _described_array(array: np.ndarray[Any, Any], what: str, index: int, max_bytes: int) -> Media:
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or 0 in array.shape:
        raise _wrong_array(array, what, index)
    height, width, _ = array.shape
    source = f"{what} {height}×{width}×3"
    _bounded(array.nbytes, index, source, max_bytes)
    header = b'{"dtype":"uint8","shape":[%d,%d,3]}' % (height, width)  # as ArrayHeader.canonical() has it
    contiguous = np.ascontiguousarray(array)
    return Media(ARRAY, header, contiguous.data.cast("B"), contiguous.nbytes, source)


def _wrong_array(array: np.ndarray[Any, Any], what: str, index: int) -> UnsupportedItem:
    source = f"{what} {'×'.join(map(str, array.shape)) or '()'} {array.dtype}"
    if array.dtype != np.uint8:
        reason = "pixels must be uint8, 0 to 255; convert floats of 0 to 1 by (x * 255).round().astype('uint8')"
        return UnsupportedItem(reason, index=index, source=source)
    chw = array.ndim == 3 and array.shape[0] == 3
    hint = ": this looks like 3×H×W, move the channels last" if chw else ""
    return UnsupportedItem(f"pixels must have the shape H×W×3{hint}", index=index, source=source)


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
    check_mode(image.mode, index, source)
    try:
        raw = image.tobytes()
    except (OSError, SyntaxError, ValueError) as error:
        raise UndecodableImage(f"Pillow cannot load it: {error}", index=index, source=source) from error
    _bounded(len(raw), index, source, max_bytes)
    mode, palette = None, None
    if image.mode in ("P", "PA") and image.palette is not None:
        mode = image.palette.mode
        palette = bytes(image.getpalette(mode) or ())
    try:
        header = PilHeader(
            mode=image.mode, size=image.size, palette_mode=mode, palette=palette,
            transparency=image.info.get("transparency"),
        )  # fmt: skip
    except ValidationError as error:
        field = error.errors()[0]["loc"][0]
        raise UnsupportedItem(f"its {field} is not one that Pillow gives", index=index, source=source) from error
    return Media(PIL, header.canonical(), raw, len(raw), source)


def check_mode(mode: str, index: int | None = None, source: str = "") -> None:
    """Refuse a PIL mode that has no defined conversion to RGB."""
    if mode not in ALPHA_MODES and mode not in OPAQUE_MODES:
        known = ", ".join(sorted(ALPHA_MODES | OPAQUE_MODES))
        raise UnsupportedMode(
            f"mode {mode!r} has no conversion to RGB here (known: {known})", index=index, source=source
        )
