"""Picture files for tests: written by Pillow where it can, by hand where it cannot."""

from __future__ import annotations

import io
import struct
import zlib
from functools import cache
from typing import Any

import numpy as np
from PIL import Image, features
from transformers.image_utils import load_image

from examples.pictures import photographs
from mmcache.server.pixels import OpenedMedia

GRAY, RGB, PALETTE, GRAY_ALPHA, RGBA = 0, 2, 3, 4, 6
"""Colour types of PNG."""

CHANNELS = {GRAY: 1, RGB: 3, PALETTE: 1, GRAY_ALPHA: 2, RGBA: 4}

ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
"""First column, first row, step of columns, step of rows of each pass."""


@cache
def photograph(width: int = 96, height: int = 64) -> Image.Image:
    """A small colour photograph, the same from no two sides."""
    with Image.open(photographs()[1]) as image:
        return Image.fromarray(np.asarray(image.convert("RGB").resize((width, height))))  # its pixels alone


def see_through() -> Image.Image:
    """The photograph in RGBA, from clear on the left to opaque on the right, with all of its colours."""
    picture = photograph().convert("RGBA")
    picture.putalpha(Image.linear_gradient("L").rotate(90).resize(picture.size))
    return picture


def saved(image: Image.Image, format_: str, **options: Any) -> bytes:
    """The image as a file."""
    data = io.BytesIO()
    image.save(data, format_, **options)
    return data.getvalue()


def opened(data: bytes) -> Image.Image:
    """The file as Pillow opens it."""
    return Image.open(io.BytesIO(data))


def decoded(data: bytes, max_pixels: int = 10**6, orientation: str = "exif") -> np.ndarray[Any, Any]:
    """The file as the decoder decodes it, into memory that is not black."""
    media = OpenedMedia("image", b"", memoryview(data), max_pixels, orientation)
    pixels = np.full((media.height, media.width, 3), 77, np.uint8)
    media.fill(pixels)
    return pixels


def chunk(name: bytes, data: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(
    values: np.ndarray[Any, Any],
    depth: int,
    kind: int,
    before: bytes = b"",
    after: bytes = b"",
    interlaced: bool = False,
) -> bytes:
    """A PNG of `values`, `[height, width, channels]`, with chunks before and after its pixels."""
    height, width, channels = values.shape
    assert channels == CHANNELS[kind], "channels of the colour type"
    passes = [values[y::dy, x::dx] for x, y, dx, dy in ADAM7] if interlaced else [values]
    rows = b"".join(b"\0" + _packed(row, depth) for part in passes if part.size for row in part)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, interlaced))
    pixels = chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + header + before + pixels + after + chunk(b"IEND", b"")


def _packed(row: np.ndarray[Any, Any], depth: int) -> bytes:
    flat = row.reshape(-1)
    if depth == 16:
        return flat.astype(">u2").tobytes()
    bits = np.unpackbits(flat.astype(np.uint8)[:, None], axis=1)[:, 8 - depth :]
    return np.packbits(bits.reshape(-1)).tobytes()


def exif(orientation: int) -> Image.Exif:
    """EXIF data that says which way up a picture is, and a little more."""
    data = Image.Exif()
    data[0x010E] = "a description that is longer than four bytes"
    data[0x0112] = orientation
    return data


def tiff(tags: dict[int, tuple[int, int, int]], payload: bytes = b"") -> bytes:
    """A little-endian TIFF: its directory (tag to type, count, value) at 8, then the payload."""
    entries = b"".join(struct.pack("<HHII", tag, *entry) for tag, entry in sorted(tags.items()))
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + payload


OPAQUE = {
    "JPEG": lambda: saved(photograph(), "JPEG"),
    "JPEG progressive": lambda: saved(photograph(), "JPEG", progressive=True, quality=60),
    "JPEG without subsampling": lambda: saved(photograph(), "JPEG", subsampling=0),
    "JPEG gray": lambda: saved(photograph().convert("L"), "JPEG"),
    "JPEG CMYK": lambda: saved(photograph().convert("CMYK"), "JPEG"),
    "PNG": lambda: saved(photograph(), "PNG"),
    "PNG gray": lambda: saved(photograph().convert("L"), "PNG"),
    "PNG 1 bit": lambda: saved(photograph().convert("1"), "PNG"),
    "PNG palette": lambda: saved(photograph().quantize(200), "PNG"),
    "PNG palette of 4 bits": lambda: saved(photograph().quantize(9), "PNG", bits=4),
    "WebP": lambda: saved(photograph(), "WEBP"),
    "WebP lossless": lambda: saved(photograph(), "WEBP", lossless=True),
    "GIF": lambda: saved(photograph().quantize(100), "GIF"),
    "BMP": lambda: saved(photograph(), "BMP"),
    "BMP palette": lambda: saved(photograph().quantize(100), "BMP"),
    "BMP 1 bit": lambda: saved(photograph().convert("1"), "BMP"),
    "TIFF": lambda: saved(photograph(), "TIFF"),
    "TIFF LZW": lambda: saved(photograph(), "TIFF", compression="tiff_lzw"),
    "TIFF JPEG": lambda: saved(photograph(), "TIFF", compression="jpeg"),
    "TIFF group 4": lambda: saved(photograph().convert("1"), "TIFF", compression="group4"),
    "TIFF CMYK": lambda: saved(photograph().convert("CMYK"), "TIFF"),
    "TIFF LAB": lambda: saved(photograph().convert("LAB"), "TIFF"),
    "TIFF palette": lambda: saved(photograph().quantize(100), "TIFF"),
    "ICO": lambda: saved(photograph(48, 48), "ICO", sizes=[(48, 48)]),
    "PPM": lambda: saved(photograph(), "PPM"),
    "TGA": lambda: saved(photograph(), "TGA", compression="tga_rle"),
    "PCX": lambda: saved(photograph(), "PCX"),
    "JPEG 2000": lambda: saved(photograph(), "JPEG2000"),
    "AVIF": lambda: saved(photograph(), "AVIF"),
}


SEE_THROUGH = {
    "PNG RGBA": lambda: saved(see_through(), "PNG"),
    "PNG gray and alpha": lambda: saved(see_through().convert("LA"), "PNG"),
    "PNG palette, one clear": lambda: saved(photograph().quantize(50), "PNG", transparency=3),
    "PNG palette, some half clear": lambda: saved(
        photograph().quantize(50), "PNG", transparency=bytes(range(0, 250, 5))
    ),
    "PNG gray, one clear": lambda: saved(photograph().convert("L"), "PNG", transparency=90),
    "PNG RGB, one clear": lambda: saved(photograph(), "PNG", transparency=photograph().getpixel((5, 5))),
    "PNG 1 bit, black clear": lambda: saved(photograph().convert("1"), "PNG", transparency=0),
    "WebP RGBA": lambda: saved(see_through(), "WEBP", lossless=True, exact=True),
    "GIF, one clear": lambda: saved(photograph().quantize(50), "GIF", transparency=3),
    "TIFF RGBA": lambda: saved(see_through(), "TIFF"),
    "TGA RGBA": lambda: saved(see_through(), "TGA"),
    "ICO RGBA": lambda: saved(see_through().resize((48, 48)), "ICO", sizes=[(48, 48)], bitmap_format="bmp"),
    "AVIF RGBA": lambda: saved(see_through(), "AVIF"),
    "JPEG 2000 RGBA": lambda: saved(see_through(), "JPEG2000"),
}


def by_loader(data: bytes) -> np.ndarray[Any, Any]:
    with opened(data) as image:
        return np.asarray(load_image(image))


def has_avif() -> bool:
    return bool(features.check("avif"))
