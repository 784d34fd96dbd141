"""What is wrong with a file that no decoder took: nobody should look for damage in a good file of another format."""

from __future__ import annotations

import io
import warnings

from PIL import TiffImagePlugin

from mmcache.errors import ItemError, UndecodableImage, UnsupportedMode
from mmcache.media import DAMAGE

OTHER_FORMATS = {
    b"qoif": "QOI", b"\x01\xda": "SGI", b"DDS ": "DDS", b"icns": "ICNS", b"BLP": "BLP", b"8BPS": "PSD", b"%!PS": "EPS",
    b"#define": "XBM", b"\xff\x0a": "JPEG XL", b"\0\0\0\x0cJXL ": "JPEG XL", b"DanM": "MSP",
    b"LinS": "MSP", b"<svg": "SVG", b"%PDF": "PDF",
}  # fmt: skip
"""By how their files begin."""

_TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


def unidentified(raw: memoryview, known: tuple[str, ...]) -> ItemError:
    """The error for a file that is of none of the formats in `known`, or whose header is broken."""
    start, taken = bytes(raw[:16]), ", ".join(known)
    if start.startswith(_TIFF_STARTS):
        return _unknown_tiff(raw)
    if start[4:8] == b"ftyp" and start[8:11] != b"avi":
        return UndecodableImage(f"a picture of format HEIF or a film, which is not taken (taken: {taken})")
    for magic, name in OTHER_FORMATS.items():
        if start.startswith(magic):
            return UndecodableImage(f"a picture of format {name}, which is not taken (taken: {taken})")
    return UndecodableImage(f"not a picture, or its header is broken (known formats: {taken})")


def _unknown_tiff(raw: memoryview) -> ItemError:
    try:
        with warnings.catch_warnings(record=True) as complaints:
            warnings.simplefilter("always")
            TiffImagePlugin.TiffImageFile(io.BytesIO(raw))
    except DAMAGE as error:
        if "unknown pixel mode" in str(error) and not complaints:  # else the directory is cut
            return UnsupportedMode("a TIFF whose kind of pixels this Pillow does not know (bits, sample format)")
        return UndecodableImage(f"a TIFF whose header is broken: {error}")
    return UndecodableImage("a TIFF whose header is broken")
