"""Descriptions of items, and the pixels that come back out of them."""

from __future__ import annotations

import io
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mmcache.errors import ImageTooLarge, ItemError, UndecodableImage, UnreadableItem, UnsupportedItem, UnsupportedMode
from mmcache.keys import ContentKey, KeyHasher
from mmcache.media import ArrayHeader, Media, describe
from mmcache.server.pixels import OpenedMedia
from tests.mmcache.support import image

LIMIT = 1 << 24


def decoded(media: Media, max_pixels: int = 10**6) -> np.ndarray[Any, Any]:
    opened = OpenedMedia(media.kind, media.header, memoryview(bytes(media.raw)), max_pixels)
    pixels = np.empty((opened.height, opened.width, 3), np.uint8)
    opened.fill(pixels)
    return pixels


def key(item: object) -> ContentKey:
    media = describe(item, 0, LIMIT)
    return KeyHasher(1).key(media.kind, media.header, media.raw)


@pytest.mark.parametrize(
    "mode", ["1", "L", "P", "RGB", "CMYK", "YCbCr", "HSV", "LAB", "LA", "PA", "RGBA", "La", "RGBa"]
)
def test_pil_images_come_back_as_pillow_would_convert_them(mode: str) -> None:
    source = Image.fromarray(image(1)).convert("RGBA")
    source.putalpha(Image.fromarray(image(2)[..., 0]))
    if mode in ("La", "PA"):
        picture = source.convert("LA").convert(mode)
    elif mode in ("RGBa", "RGBA"):
        picture = source.convert(mode)
    else:
        picture = source.convert("RGB" if mode != "LA" else "RGBA").convert(mode)
    assert picture.mode == mode
    got = decoded(describe(picture, 0, LIMIT))
    if mode in ("LA", "PA", "RGBA", "La", "RGBa"):
        rgba = picture.convert("LA" if mode == "La" else "RGBA").convert("RGBA")
        expected = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    else:
        expected = picture.convert("RGB")
    np.testing.assert_array_equal(got, np.asarray(expected))


def test_palette_and_transparency_are_part_of_the_key_and_the_pixels() -> None:
    pixels = np.arange(64, dtype=np.uint8).reshape(8, 8)
    plain = Image.fromarray(pixels)
    plain.putpalette([value for i in range(256) for value in (i, 255 - i, 7)])
    other = plain.copy()
    other.putpalette([value for i in range(256) for value in (i, 255 - i, 8)])
    clear, partly = plain.copy(), plain.copy()
    clear.info["transparency"] = 5
    partly.info["transparency"] = bytes(range(64))
    assert len({key(picture) for picture in (plain, other, clear, partly)}) == 4
    assert tuple(decoded(describe(plain, 0, LIMIT))[0, 5]) == (5, 250, 7)
    assert tuple(decoded(describe(clear, 0, LIMIT))[0, 5]) == (255, 255, 255)
    assert tuple(decoded(describe(partly, 0, LIMIT))[0, 0]) == (255, 255, 255)


def test_shape_and_kind_are_part_of_the_key() -> None:
    flat = np.arange(30 * 150 * 3, dtype=np.uint32).astype(np.uint8)
    wide, tall = flat.reshape(30, 150, 3), flat.reshape(150, 30, 3)
    assert len({key(wide), key(tall), key(Image.fromarray(wide)), key(flat.tobytes())}) == 4


def test_layout_is_not_part_of_the_key() -> None:
    pixels = image(3)
    turned = np.asfortranarray(pixels)
    backwards = pixels[::-1].copy()[::-1]
    spaced = np.repeat(pixels, 2, axis=1)[:, ::2]
    frozen = pixels.copy()
    frozen.flags.writeable = False
    variants = [pixels, turned, backwards, spaced, frozen, torch.from_numpy(pixels), torch.from_numpy(pixels.copy())]
    assert len({key(variant) for variant in variants}) == 1
    for variant in variants:
        np.testing.assert_array_equal(decoded(describe(variant, 0, LIMIT)), pixels)


@pytest.mark.parametrize("format_", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "TGA", "ICO"])
def test_encoded_files(format_: str) -> None:
    data = io.BytesIO()
    picture = Image.fromarray(image(4, 48, 64))
    picture.save(data, format_)
    with Image.open(io.BytesIO(data.getvalue())) as opened:
        expected = np.asarray(opened.convert("RGB"))
    got = decoded(describe(data.getvalue(), 0, LIMIT))
    if format_ == "ICO":
        assert got.shape == expected.shape
    else:
        np.testing.assert_array_equal(got, expected)


def test_transparent_png_is_composited_on_white() -> None:
    data = io.BytesIO()
    Image.new("RGBA", (4, 4), (10, 20, 30, 0)).save(data, "PNG")
    assert (decoded(describe(data.getvalue(), 0, LIMIT)) == 255).all()


def test_limits() -> None:
    with pytest.raises(ImageTooLarge, match=r"max_item_bytes"):
        describe(bytes(11), 3, 10)
    with pytest.raises(ImageTooLarge, match=r"max_item_bytes"):
        describe(image(1), 3, 10)
    with pytest.raises(ImageTooLarge, match=r"84×56 is 4704 pixels, the limit is 4703"):
        decoded(describe(image(1), 0, LIMIT), 84 * 56 - 1)
    with pytest.raises(ItemError) as caught:
        describe(object(), 7, LIMIT)
    assert caught.value.index == 7


def test_a_bomb_is_refused_from_its_header() -> None:
    data = io.BytesIO()
    Image.new("1", (30_000, 30_000)).save(data, "PNG")
    assert len(data.getvalue()) < 1 << 20
    with pytest.raises(ImageTooLarge, match="900000000 pixels"):
        decoded(describe(data.getvalue(), 0, LIMIT), 100_000_000)


def test_sizes_are_checked_before_memory_is_taken() -> None:
    with pytest.raises(ImageTooLarge, match="400000000 pixels"):
        OpenedMedia("pil", b'{"mode":"RGB","size":[20000,20000]}', memoryview(bytes(3)), 1_000_000)
    with pytest.raises(UndecodableImage, match="3 bytes are not a PIL image"):
        OpenedMedia("pil", b'{"mode":"RGB","size":[900,900]}', memoryview(bytes(3)), 1_000_000)
    inner = io.BytesIO()
    Image.new("L", (3000, 3000)).save(inner, "PNG")
    entry = struct.pack("<BBBBHHII", 16, 16, 0, 0, 1, 32, len(inner.getvalue()), 22)
    icon = struct.pack("<HHH", 0, 1, 1) + entry + inner.getvalue()
    with pytest.raises(ImageTooLarge):
        decoded(describe(icon, 0, LIMIT), 1_000_000)


@pytest.mark.parametrize("mode", ["I", "F", "I;16", "I;16B"])
def test_modes_without_a_conversion(mode: str) -> None:
    picture = Image.new(mode, (4, 4))
    with pytest.raises(UnsupportedMode, match=mode):
        describe(picture, 0, LIMIT)


def test_sixteen_bit_png_is_refused_where_it_is_decoded() -> None:
    data = io.BytesIO()
    Image.fromarray(np.full((4, 4), 40_000, np.uint16)).save(data, "PNG")
    with pytest.raises(UnsupportedMode, match="I;16"):
        decoded(describe(data.getvalue(), 0, LIMIT))


def test_damaged_headers_of_arrays_and_pil_images() -> None:
    raw = memoryview(bytes(12))
    with pytest.raises(UnsupportedItem):
        OpenedMedia("array", b'{"dtype":"uint8","shape":[4,4,3]}', raw, 100)
    with pytest.raises(UndecodableImage):
        OpenedMedia("pil", b'{"mode":"RGB","size":[4,4]}', raw, 100)
    with pytest.raises(UnsupportedItem, match="unknown kind"):
        OpenedMedia("video", b"", raw, 100)


@pytest.mark.parametrize(
    "header",
    [b"", b"{", b"[]", b"{}", b"null", b'{"shape":5}', b'{"shape":["a","b",3]}', b'{"shape":[-4,-1,3]}', b"\xff"],
)
@pytest.mark.parametrize("kind", ["array", "pil"])
def test_garbage_headers(kind: str, header: bytes) -> None:
    with pytest.raises(ItemError):
        OpenedMedia(kind, header, memoryview(bytes(12)), 100)


def test_headers_are_the_same_in_every_release() -> None:
    """They are hashed into the keys: a change of a byte here needs a new key version."""
    assert describe(image(1), 0, LIMIT).header == b'{"dtype":"uint8","shape":[56,84,3]}'
    assert ArrayHeader(shape=(56, 84, 3)).canonical() == describe(image(1), 0, LIMIT).header
    assert describe(b"abc", 0, LIMIT).header == b""
    palette = Image.new("P", (2, 1))
    palette.putpalette(b"\x00\xff\xfe")
    palette.info["transparency"] = b"\x00\xff"
    assert describe(palette, 0, LIMIT).header == (
        b'{"mode":"P","size":[2,1],"palette_mode":"RGB","palette":"AP_-","transparency":"AP8="}'
    )
    key = Image.new("RGB", (2, 1))
    key.info["transparency"] = (1, 2, 3)
    assert describe(key, 0, LIMIT).header == b'{"mode":"RGB","size":[2,1],"transparency":[1,2,3]}'


def test_a_named_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnreadableItem, match="not a regular file"):
        describe(tmp_path / "pipe", 0, LIMIT)


def test_truncated_files_are_refused_not_filled() -> None:
    for format_ in ("PNG", "JPEG", "WEBP", "BMP", "TIFF"):
        data = io.BytesIO()
        Image.fromarray(image(5, 120, 160)).save(data, format_)
        with pytest.raises(UndecodableImage):
            decoded(describe(data.getvalue()[: len(data.getvalue()) * 2 // 3], 0, LIMIT))


def test_a_pil_image_that_pillow_cannot_load(tmp_path: Path) -> None:
    path = tmp_path / "half.png"
    data = io.BytesIO()
    Image.fromarray(image(6, 120, 160)).save(data, "PNG")
    path.write_bytes(data.getvalue()[: len(data.getvalue()) // 2])
    with Image.open(path) as picture, pytest.raises(UndecodableImage, match="Pillow cannot load it") as caught:
        describe(picture, 4, LIMIT)
    assert (caught.value.index, caught.value.source) == (4, "PIL image 160×120 RGB")


def test_a_pil_image_beyond_the_limit_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    Image.new("RGB", (2000, 2000)).save(tmp_path / "large.png")
    with Image.open(tmp_path / "large.png") as picture:
        with pytest.raises(ImageTooLarge, match=r"12000000 bytes, the limit is 1000000 \(max_item_bytes\)"):
            describe(picture, 0, 1_000_000)
        assert picture.tile, "not decoded"
