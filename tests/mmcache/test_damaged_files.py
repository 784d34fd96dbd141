"""Truncated, damaged and hostile files: the right pixels or a typed error, and bounded memory."""

from __future__ import annotations

import random
import struct
import tracemalloc
import zlib
from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from mmcache.errors import ImageTooLarge, ItemError, UndecodableImage
from mmcache.images.jpeg_segments import collected_exif
from mmcache.images.tiff_directory import check_directory
from tests.mmcache.picture_files import (
    GRAY,
    OPAQUE,
    RGB,
    SEE_THROUGH,
    chunk,
    decoded,
    exif,
    has_avif,
    opened,
    photograph,
    png,
    saved,
    tiff,
)

FILES = {name: make for name, make in (OPAQUE | SEE_THROUGH).items() if has_avif() or not name.startswith("AVIF")}
FILES |= {
    "PNG with EXIF": lambda: saved(photograph(), "PNG", exif=exif(6)),
    "JPEG with EXIF": lambda: saved(photograph(), "JPEG", exif=exif(6)),
    "TIFF with EXIF": lambda: saved(photograph(), "TIFF", exif=exif(6), compression="tiff_deflate"),
    "APNG": lambda: saved(photograph(), "PNG", save_all=True, append_images=[photograph().rotate(180)]),
    "GIF of two frames": lambda: saved(photograph(), "GIF", save_all=True, append_images=[photograph().rotate(180)]),
    "WebP of two frames": lambda: saved(photograph(), "WEBP", save_all=True, append_images=[photograph().rotate(180)]),
    "TIFF of two pages": lambda: saved(photograph(), "TIFF", save_all=True, append_images=[photograph().rotate(180)]),
    "MPO": lambda: saved(photograph(), "MPO", save_all=True, append_images=[photograph().rotate(180)]),
    "PNG interlaced": lambda: png(np.asarray(photograph()), 8, RGB, interlaced=True),
    "PNG with late EXIF": lambda: png(
        np.asarray(photograph()), 8, RGB, after=chunk(b"eXIf", exif(6).tobytes().removeprefix(b"Exif\0\0"))
    ),
    "plain PNM": lambda: b"P3 8 8 255\n" + b" ".join(b"%d" % (i % 256) for i in range(192)) + b"\n",
}

MAY_LOSE_METADATA = {"PNG with late EXIF", "TIFF with EXIF"}
"""Cut after the pixels, these lose what says which way up they are."""


def test_pillow_is_never_told_to_fill_what_is_missing() -> None:
    decoded(saved(photograph(), "JPEG"))
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_refused_or_has_all_of_its_pixels(name: str) -> None:
    data = FILES[name]()
    accepted = [decoded(data).tobytes()]
    if name in MAY_LOSE_METADATA:
        accepted.append(decoded(data, orientation="ignore").tobytes())
    spread = random.Random(name).sample(range(len(data)), min(len(data), 60))
    num_refused = 0
    for length in sorted({*range(0, min(len(data), 64), 5), *spread, *range(len(data) - 12, len(data))}):
        try:
            pixels = decoded(data[:length])
        except UndecodableImage:
            num_refused += 1
        else:
            assert pixels.tobytes() in accepted, f"cut to {length} of {len(data)} bytes"
    assert num_refused > 10


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_damage_gives_pixels_or_a_typed_error(data: st.DataObject) -> None:
    file = bytearray(_file(data.draw(st.sampled_from(sorted(FILES)))))
    reach = data.draw(st.sampled_from([64, 400, len(file)]))
    for _ in range(data.draw(st.integers(1, 6))):
        file[data.draw(st.integers(0, min(reach, len(file)) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.one_of(st.just(len(file)), st.integers(0, len(file))))
    try:
        pixels = decoded(bytes(file[:end]), orientation=data.draw(st.sampled_from(["exif", "ignore"])))
    except ItemError:
        return
    assert 0 < pixels.size <= 3 * 10**6


@cache
def _file(name: str) -> bytes:
    return FILES[name]()


def _gif_header(screen: int, frame: int) -> bytes:
    return (
        b"GIF89a"
        + struct.pack("<HHBBB", screen, screen, 0, 0, 0)
        + struct.pack("<BHHHHBB", 44, 0, 0, frame, frame, 0, 2)
    )


def _jpeg_of_size(side: int) -> bytes:
    data = saved(photograph(), "JPEG")
    size = data.index(b"\xff\xc0") + 5
    return data[:size] + struct.pack(">HH", side, side) + data[size + 4 :]


@pytest.mark.parametrize(
    "data",
    [
        saved(Image.new("1", (30_000, 30_000)), "PNG"),
        _jpeg_of_size(30_000),
        _gif_header(30_000, 1),
        _gif_header(1, 30_000),
        tiff({256: (4, 1, 30_000), 257: (4, 1, 30_000), 258: (3, 1, 8), 262: (3, 1, 1), 273: (4, 1, 8)}),
        b"P5 30000 30000 255\n",
        b"BM" + struct.pack("<IIIIiiHHIIIIII", 54, 0, 54, 40, 30_000, 30_000, 1, 24, 0, 0, 0, 0, 0, 0),
        bytes((0, 0, 2)) + bytes(9) + struct.pack("<HHBB", 30_000, 30_000, 24, 0),
    ],
    ids=["PNG", "JPEG", "GIF screen", "GIF frame", "TIFF", "PPM", "BMP", "TGA"],
)
def test_a_size_beyond_the_limit_is_refused_from_the_header(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ImageTooLarge, match=r"900000000 pixels.*limit is 1000000 \(max_pixels\)"):
            decoded(data, 1_000_000)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_limit_counts_the_pixels_and_not_the_sides() -> None:
    data = saved(photograph(), "JPEG", exif=exif(6))
    assert decoded(data, 96 * 64).shape == (96, 64, 3)
    with pytest.raises(ImageTooLarge, match="is 6144 pixels, the limit is 6143"):
        decoded(data, 96 * 64 - 1)


def test_tiles_larger_than_their_picture_are_bounded() -> None:
    tags = {256: (4, 1, 16), 257: (4, 1, 16), 258: (3, 1, 8), 259: (3, 1, 8), 262: (3, 1, 1), 277: (3, 1, 1)}
    tags |= {322: (4, 1, 40_000), 323: (4, 1, 40_000), 324: (4, 1, 8), 325: (4, 1, 8)}
    with pytest.raises(ImageTooLarge, match="tiles of 40000×40000, the limit is 1000000"):
        decoded(tiff(tags))


def test_text_of_a_png_is_bounded() -> None:
    bomb = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(80 << 20), 9))
    assert len(bomb) < 1 << 20
    values = np.asarray(photograph())
    with pytest.raises(UndecodableImage, match=r"header is broken: .*MAX_TEXT_CHUNK"):
        decoded(png(values, 8, RGB, before=bomb))
    with pytest.raises(UndecodableImage, match="MAX_TEXT_CHUNK"):
        decoded(png(values, 8, RGB, after=bomb))


def test_pixels_of_a_png_beyond_its_size_are_not_kept() -> None:
    values = np.zeros((20_000, 16, 1), np.uint8)
    data = bytearray(png(values, 8, GRAY))
    data[20:24] = struct.pack(">I", 16)  # the header says 16 rows
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    assert decoded(bytes(data)).shape == (16, 16, 3)


def check_refused_unread(data: bytes) -> None:
    """A directory whose values would fill memory is refused, and little memory was taken for that."""
    tracemalloc.start()
    try:
        with pytest.raises(UndecodableImage, match="values of its TIFF directory have more than"):
            decoded(data)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_directory_of_many_large_values_is_refused_before_it_is_read() -> None:
    good = saved(photograph(), "TIFF", exif=exif(1), compression="tiff_lzw")
    check_directory(good)
    entry = struct.pack("<HHII", 0x010E, 2, 400_000, 8)
    bomb = b"II*\0\x08\0\0\0" + struct.pack("<H", 40_000) + entry * 40_000
    big_entry = struct.pack("<HHQQ", 0x010E, 2, 400_000, 16)
    big_bomb = b"II+\0\x08\0\0\0" + struct.pack("<QQ", 16, 40_000) + big_entry * 40_000
    for data in (bomb, big_bomb):
        check_refused_unread(data)


def _jpeg_with_exif(*parts: bytes, junk: bytes = b"") -> bytes:
    segments = b"".join(b"\xff\xe1" + struct.pack(">H", len(part) + 8) + b"Exif\0\0" + part + junk for part in parts)
    data = saved(photograph(), "JPEG")
    return data[:2] + segments + data[2:]


@pytest.mark.parametrize("junk", [b"", b"\xff\xff", b"\xff\0", b"junk"])
def test_the_exif_data_of_a_jpeg_is_collected_as_pillow_does(junk: bytes) -> None:
    parts = [bytes([65 + index]) * size for index, size in enumerate((100, 0, 65_000, 7))]
    data = _jpeg_with_exif(*parts, junk=junk)
    assert collected_exif(memoryview(data)) == b"".join(parts)
    with opened(data) as image:
        assert image.info["exif"] == b"Exif\0\0" + b"".join(parts)
    assert collected_exif(memoryview(saved(photograph(), "PNG", exif=exif(6)))) == b""


def test_exif_of_a_jpeg_that_asks_for_much_memory_is_refused() -> None:
    entry = struct.pack("<HHII", 0x010E, 2, 100_000, 8)
    bomb = b"II*\0\x08\0\0\0" + struct.pack("<H", 20_000) + entry * 20_000
    data = _jpeg_with_exif(*(bomb[start : start + 60_000] for start in range(0, len(bomb), 60_000)))
    check_refused_unread(data)


def test_a_directory_of_very_many_strips_is_refused() -> None:
    count = (1 << 21) + 1
    tags = {256: (4, 1, 16), 257: (4, 1, 16), 262: (3, 1, 1), 273: (4, count, 8)}
    with pytest.raises(UndecodableImage, match="holds more than 2097152 numbers"):
        decoded(tiff(tags, bytes(4 * count)))


def test_pictures_without_pixels() -> None:
    for data in (b"P5 0 4 255\n", png(np.zeros((0, 4, 1), np.uint8), 8, GRAY), b"GIF89a" + bytes(7) + b"," + bytes(9)):
        with pytest.raises(UndecodableImage):
            decoded(data)
