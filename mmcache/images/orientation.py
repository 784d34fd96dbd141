"""EXIF orientation: which way up a picture is, read before its pixels are.

The tag is read as Pillow's `exif_transpose` reads it, XMP as its stand-in included. Where that raises, or the value is
not 1 to 8, the picture counts as upright: bad metadata does not fail a good picture.
"""

from __future__ import annotations

import io
import struct

from PIL import ExifTags, Image

from mmcache.errors import UndecodableImage
from mmcache.images.jpeg_segments import without_prefixes
from mmcache.images.tiff_directory import check_directory
from mmcache.media import DAMAGE

UPRIGHT = 1

TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What makes a picture of this orientation upright. From 5 on it swaps width and height."""

UNDONE = TURNS | {6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
"""What undoes it: all but the quarter turns undo themselves."""

_TEXT_CHUNKS = (b"iTXt", b"tEXt", b"zTXt")
_KEYWORDS = (b"XML:com.adobe.xmp\0", b"Raw profile type exif\0")
_CHUNK = struct.Struct(">I4s")


def read_orientation(image: Image.Image, raw: memoryview) -> int:
    """Orientation of an opened file, 1 to 8, without decoding `image` itself.

    Args:
        image: opened, of a size within the limits.
        raw: the whole file.
    """
    try:
        if image.format == "PNG" and _has_late_metadata(raw):
            with Image.open(io.BytesIO(raw), formats=["PNG"]) as other:
                other.load()  # a chunk after the pixels is seen only by reading them; the copy is dropped at once
                return _orientation(other)
        return _orientation(image)
    except (*DAMAGE, UndecodableImage):
        return UPRIGHT


def _orientation(image: Image.Image) -> int:
    blob = _exif_blob(image)
    check_directory(without_prefixes(blob))
    exif = Image.Image.getexif(image)  # a PNG's own method would decode it to look for more
    number = exif.get(ExifTags.Base.Orientation, UPRIGHT)
    return int(number) if number in TURNS else UPRIGHT


def _exif_blob(image: Image.Image) -> bytes:
    blob, text = image.info.get("exif"), image.info.get("Raw profile type exif")
    if blob is None and text is not None:
        blob = bytes.fromhex("".join(text.split("\n")[3:]))
    return blob if isinstance(blob, bytes) else b""


def _has_late_metadata(raw: memoryview) -> bool:
    """Whether a PNG says something about its orientation after its pixels."""
    offset, is_late = 8, False
    while offset + _CHUNK.size <= raw.nbytes:
        nbytes, name = _CHUNK.unpack_from(raw, offset)
        data = offset + _CHUNK.size
        if is_late and (name == b"eXIf" or _is_telling_text(name, raw[data : data + 32])):
            return True
        is_late = is_late or name == b"IDAT"
        offset = data + nbytes + 4
    return False


def _is_telling_text(name: bytes, start: memoryview) -> bool:
    return name in _TEXT_CHUNKS and bytes(start).startswith(_KEYWORDS)
