"""What an item is, as the client describes it. The decoder's half, which turns it into pixels, is server/pixels.py.

An item travels as (kind, header, raw): `kind` is `image` (an encoded file, empty header), `array` (uint8 H×W×3, H×W
or T×H×W×3, in C order whatever the user's layout was) or `pil` (a PIL image); `header` is canonical JSON of everything
besides the raw bytes that decides the pixels. The content key covers all three.
"""

from __future__ import annotations

import os
import stat
import struct
import sys
import zlib
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mmcache.array_checks import checked_array
from mmcache.errors import ImageTooLarge, UndecodableImage, UnreadableItem, UnsupportedItem, UnsupportedMode

if TYPE_CHECKING:
    from PIL import Image

IMAGE, ARRAY, PIL = "image", "array", "pil"

ALPHA_MODES = frozenset({"LA", "La", "PA", "RGBA", "RGBa"})
OPAQUE_MODES = frozenset({"1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "HSV", "LAB"})
DEEP_MODES = frozenset({"I", "F", "I;16", "I;16B", "I;16L", "I;16N"})
"""Refused. The reference cuts their values off at 255, which turns a picture white, and their range is not known."""

BYTES_A_PIXEL = {"L": 1, "P": 1, "LA": 2, "La": 2, "PA": 2, "RGB": 3, "YCbCr": 3, "HSV": 3, "LAB": 3}
"""In a PIL image's raw bytes, by mode; 4 for the other modes, and a bit for mode 1, its rows in whole bytes."""

DAMAGE = (
    OSError, SyntaxError, ValueError, TypeError, LookupError, EOFError, ArithmeticError, RuntimeError, MemoryError,
    struct.error, zlib.error,
)  # fmt: skip
"""What Pillow raises on damaged files. Anything else ends the decoder, which costs this item alone."""

Side = Annotated[int, Field(ge=1, lt=1 << 31)]


class CanonicalHeader(BaseModel):
    """Canonical: the fields in their order, no spaces, unset ones left out."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, ser_json_bytes="base64", val_json_bytes="base64"
    )

    def canonical(self) -> bytes:
        """The header's bytes; they are part of the key."""
        return self.model_dump_json(exclude_none=True).encode()


class ArrayHeader(CanonicalHeader):
    """Header of an `array`: an RGB picture, a gray one, or a video chunk of RGB frames."""

    dtype: Literal["uint8"] = "uint8"
    shape: tuple[Side, Side, Literal[3]] | tuple[Side, Side] | tuple[Side, Side, Side, Literal[3]]


class PilHeader(CanonicalHeader):
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
    """Describe one item: `bytes`, a path, a PIL image, or a uint8 array or CPU tensor. Reads paths.

    Arrays and tensors may have any memory layout and are H×W×3 (RGB), H×W (gray) or T×H×W×3 (a video chunk). The number
    of axes and a last one of 3 decide, nothing else: 3×5×3 is a picture three pixels high.

    Raises:
        UnreadableItem, UnsupportedItem, UnsupportedMode, UndecodableImage, ImageTooLarge: with `index` and the source.
    """
    if isinstance(item, bytes | bytearray | memoryview):
        return _described_bytes(item, index, max_bytes)
    if isinstance(item, str | os.PathLike):
        return _described_path(item, index, max_bytes)
    if isinstance(item, np.ndarray):
        return _described_array(item, index, max_bytes)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(item, torch.Tensor):
        return _described_tensor(item, index, max_bytes)
    pil = sys.modules.get("PIL.Image")
    if pil is not None and isinstance(item, pil.Image):
        return _described_pil(item, index, max_bytes)
    raise UnsupportedItem(
        f"{type(item).__name__} is not an item: give bytes, a path, a PIL image, or a uint8 array or tensor, "
        "H×W×3, H×W or T×H×W×3",
        index=index,
    )


def _bounded(nbytes: int, index: int, source: str, max_bytes: int) -> None:
    if nbytes > max_bytes:
        raise ImageTooLarge(f"{nbytes} bytes, the limit is {max_bytes} (max_item_bytes)", index=index, source=source)
    if nbytes == 0:
        raise UndecodableImage("empty: 0 bytes", index=index, source=source)


def _described_bytes(item: bytes | bytearray | memoryview, index: int, max_bytes: int) -> Media:
    if isinstance(item, memoryview) and (item.ndim != 1 or item.format not in ("B", "b", "c")):
        what = f"memoryview of {item.ndim} axes and format {item.format!r}"
        hint = "the bytes of an encoded file have one axis and format 'B'; for pixels give numpy.asarray(x)"
        raise UnsupportedItem(hint, index=index, source=what)
    nbytes = item.nbytes if isinstance(item, memoryview) else len(item)
    _bounded(nbytes, index, "bytes", max_bytes)
    return Media(IMAGE, b"", bytes(item), nbytes, "bytes")


def _described_path(item: str | os.PathLike[str], index: int, max_bytes: int) -> Media:
    try:
        source = os.fspath(item)
    except Exception as error:  # whatever the user's own class raises is a bad item
        raise UnreadableItem(f"its path cannot be had: {error!r}", index=index, source=type(item).__name__) from error
    if isinstance(source, bytes):
        source = os.fsdecode(source)
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


def _described_array(array: np.ndarray[Any, Any], index: int, max_bytes: int) -> Media:
    dtype = "uint8" if array.dtype == np.uint8 else array.dtype.name  # a name takes longer than a comparison
    source = checked_array(array.shape, dtype, "array", index)
    if isinstance(array, np.ma.MaskedArray):
        raise UnsupportedItem("a masked array has no pixels where its mask is; x.filled(0)", index=index, source=source)
    return _media_of_array(array, source, index, max_bytes)


def _tensor_hint(tensor: Any, torch: Any) -> str:
    if tensor.device.type == "meta":
        return "a tensor on the device meta has no data"
    if tensor.is_nested:
        return "a nested tensor is several: give each of x.unbind() as an item of its own"
    if tensor.layout != torch.strided:
        return "tensors must be dense; call .to_dense() first"
    if tensor.device.type == "cuda":
        return "tensors must be on the CPU: call .cpu() first, or client.stage(x), which takes those of CUDA devices"
    return "tensors must be on the CPU; call .cpu() first"


def _described_tensor(tensor: Any, index: int, max_bytes: int) -> Media:
    torch = sys.modules["torch"]
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_nested:
        source = f"tensor on {tensor.device}"
        raise UnsupportedItem(_tensor_hint(tensor, torch), index=index, source=source)
    source = checked_array(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), "tensor", index)
    _bounded(tensor.numel(), index, source, max_bytes)
    try:
        array = tensor.numpy(force=True)  # else a negated view is refused
    except (RuntimeError, TypeError) as error:
        raise UnsupportedItem(f"its memory cannot be read: {error}", index=index, source=source) from error
    return _media_of_array(array, source, index, max_bytes)


def _media_of_array(array: np.ndarray[Any, Any], source: str, index: int, max_bytes: int) -> Media:
    _bounded(array.nbytes, index, source, max_bytes)  # before a broadcast view is written out
    shape = ",".join(map(str, array.shape))
    header = f'{{"dtype":"uint8","shape":[{shape}]}}'.encode()  # as ArrayHeader.canonical() has it
    contiguous = np.ascontiguousarray(array)
    return Media(ARRAY, header, contiguous.data.cast("B"), contiguous.nbytes, source)


def _described_pil(image: Image.Image, index: int, max_bytes: int) -> Media:
    """As it stands: an EXIF orientation among its `info` is no part of it, as for the reference's processor."""
    source = f"PIL image {image.width}×{image.height} {image.mode}"
    check_mode(image.mode, index, source)
    _bounded(pil_nbytes(image.mode, image.size), index, source, max_bytes)
    try:
        image.load()
        check_mode(image.mode, index, source)
        raw = image.tobytes()
    except DAMAGE as error:
        raise UndecodableImage(f"Pillow cannot load it: {error}", index=index, source=source) from error
    _bounded(len(raw), index, source, max_bytes)
    return Media(PIL, _pil_header(image, index, source).canonical(), raw, len(raw), source)


def _pil_header(image: Image.Image, index: int, source: str) -> PilHeader:
    mode, palette = None, None
    if image.mode in ("P", "PA") and image.palette is not None:
        mode = image.palette.mode
        palette = bytes(image.getpalette(mode) or ())
    _check_transparency(image, index, source)
    try:
        return PilHeader(
            mode=image.mode, size=image.size, palette_mode=mode, palette=palette,
            transparency=image.info.get("transparency"),
        )  # fmt: skip
    except ValidationError as error:
        field = error.errors()[0]["loc"][0]
        raise UnsupportedItem(f"its {field} is not one that Pillow gives", index=index, source=source) from error


def _check_transparency(image: Image.Image, index: int, source: str) -> None:
    """Refuse what Pillow would not composite; the decoder would find it out, and take it for damage."""
    if image.info.get("transparency") is None or image.mode in ALPHA_MODES:
        return
    try:
        image.crop((0, 0, 1, 1)).convert("RGBA")
    except DAMAGE as error:
        reason = f"its transparency is not one that Pillow takes for mode {image.mode!r}: {error}"
        raise UnsupportedItem(f"{reason}; del image.info['transparency']", index=index, source=source) from error


def pil_nbytes(mode: str, size: tuple[int, int]) -> int:
    """Raw bytes of a PIL image of a known mode."""
    width, height = size
    row = -(-width // 8) if mode == "1" else width * BYTES_A_PIXEL.get(mode, 4)
    return row * height


def check_mode(mode: str, index: int | None = None, source: str = "") -> None:
    """Refuse a PIL mode that has no defined conversion to RGB.

    Raises:
        UnsupportedMode: names the mode, and says what to do about one of more than 8 bits a value.
    """
    if mode in DEEP_MODES:
        hint = "scale its values to 8 bits first: Image.fromarray((numpy.asarray(image) >> 8).astype('uint8')) for 16"
        reason = f"mode {mode!r} holds more than 8 bits a value, in a range that is not known; {hint}"
        raise UnsupportedMode(reason, index=index, source=source)
    if mode not in ALPHA_MODES and mode not in OPAQUE_MODES:
        known = ", ".join(sorted(ALPHA_MODES | OPAQUE_MODES))
        raise UnsupportedMode(
            f"mode {mode!r} has no conversion to RGB here (known: {known})", index=index, source=source
        )
