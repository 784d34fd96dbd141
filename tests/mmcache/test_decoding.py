"""Picture files become the pixels that the public reference makes of them.

The reference has two halves: `load_image`, which its processors use on paths and URLs (it turns by EXIF and converts to
RGB), and the conversion inside the processor, which composites transparency on white. A file goes through both here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageOps
from transformers.image_transforms import convert_to_rgb
from transformers.image_utils import load_image

import mmcache
from examples.pictures import photographs
from mmcache.errors import ImageTooLarge, ItemError, UndecodableImage, UnreadableItem, UnsupportedItem, UnsupportedMode
from mmcache.media import describe
from mmcache.server.pixels import OpenedMedia
from tests.mmcache.picture_files import (
    CHANNELS,
    GRAY,
    GRAY_ALPHA,
    OPAQUE,
    PALETTE,
    RGB,
    RGBA,
    SEE_THROUGH,
    by_loader,
    chunk,
    decoded,
    has_avif,
    opened,
    photograph,
    png,
    saved,
    see_through,
)
from tests.mmcache.support import SidecarProcess


def by_processor(data: bytes) -> np.ndarray[Any, Any]:
    with opened(data) as image:
        return np.asarray(convert_to_rgb(ImageOps.exif_transpose(image), return_numpy=True))


@pytest.mark.parametrize("name", OPAQUE)
def test_opaque_files_have_the_pixels_of_the_reference(name: str) -> None:
    if name == "AVIF" and not has_avif():
        pytest.skip("this Pillow has no AVIF")
    data = OPAQUE[name]()
    pixels = decoded(data)
    assert pixels.std() > 10, "a picture is in it"
    np.testing.assert_array_equal(pixels, by_loader(data))
    if name != "TIFF LAB":  # the processor takes the A of LAB for transparency, and what it makes of it is not defined
        np.testing.assert_array_equal(pixels, by_processor(data))


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")  # what the loader says as it drops it
@pytest.mark.parametrize("name", SEE_THROUGH)
def test_transparency_is_composited_on_white_as_the_processor_does(name: str) -> None:
    if name == "AVIF RGBA" and not has_avif():
        pytest.skip("this Pillow has no AVIF")
    data = SEE_THROUGH[name]()
    pixels = decoded(data)
    np.testing.assert_array_equal(pixels, by_processor(data))
    assert (pixels != by_loader(data)).any(), "the loader alone drops transparency: it would show what is hidden"
    assert (pixels >= 250).all(axis=2).any(), "something is clear"


@pytest.mark.parametrize("path", photographs(), ids=lambda path: path.stem)
def test_photographs_have_the_pixels_of_the_reference(path: Path) -> None:
    pixels = decoded(path.read_bytes(), 10**8)
    np.testing.assert_array_equal(pixels, np.asarray(load_image(str(path))))


@pytest.mark.parametrize(
    ("depth", "kind"),
    [
        *((depth, GRAY) for depth in (1, 2, 4, 8)),
        *((depth, kind) for depth in (8, 16) for kind in (RGB, GRAY_ALPHA, RGBA)),
    ],
)
@pytest.mark.parametrize("interlaced", [False, True])
def test_png_of_every_depth(depth: int, kind: int, interlaced: bool) -> None:
    values = np.random.default_rng(depth * 10 + kind).integers(0, 1 << depth, (13, 21, CHANNELS[kind]))
    data = png(values, depth, kind, interlaced=interlaced)
    pixels = decoded(data)
    np.testing.assert_array_equal(pixels, by_processor(data))
    scaled = values >> 8 if depth == 16 else values * 255 // ((1 << depth) - 1)
    if kind in (GRAY, RGB):
        np.testing.assert_array_equal(pixels, np.broadcast_to(scaled, pixels.shape))
    else:
        opacity = scaled[..., -1:]
        expected = (scaled[..., :-1] * opacity + 255 * (255 - opacity)) / 255
        assert np.abs(pixels - expected).max() <= 1


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_png_palettes_of_every_depth(depth: int) -> None:
    rng = np.random.default_rng(depth)
    colours = rng.integers(0, 256, (1 << depth, 3), np.uint8)
    values = rng.integers(0, 1 << depth, (9, 17, 1))
    before = chunk(b"PLTE", colours.tobytes())
    for interlaced in (False, True):
        plain = png(values, depth, PALETTE, before, interlaced=interlaced)
        np.testing.assert_array_equal(decoded(plain), colours[values[..., 0]])
        clear = png(values, depth, PALETTE, before + chunk(b"tRNS", b"\0"), interlaced=interlaced)
        expected = np.where(values == 0, 255, colours[values[..., 0]])
        np.testing.assert_array_equal(decoded(clear), expected)
        np.testing.assert_array_equal(decoded(clear), by_processor(clear))


@pytest.mark.parametrize(
    ("mode", "data"),
    [
        ("I;16", png(np.full((4, 4, 1), 40_000), 16, GRAY)),
        ("I;16", saved(Image.new("I;16", (4, 4), 40_000), "TIFF")),
        ("I", saved(Image.new("I", (4, 4), 40_000), "TIFF")),
        ("F", saved(Image.new("F", (4, 4), 0.5), "TIFF")),
        ("I", b"P5 2 2 65535\n" + bytes(8)),
    ],
)
def test_more_than_8_bits_of_gray_are_refused(mode: str, data: bytes) -> None:
    with pytest.raises(UnsupportedMode, match=rf"mode '{mode}' holds more than 8 bits.*scale its values"):
        decoded(data)


def test_the_reference_would_turn_16_bit_gray_white() -> None:
    """Why it is refused."""
    data = png(np.arange(300, 65_500, 163).reshape(20, 20, 1), 16, GRAY)
    assert (by_loader(data) == 255).all()


@pytest.mark.parametrize("format_", ["GIF", "PNG", "WEBP", "TIFF", "MPO", "AVIF"])
def test_the_first_frame_is_taken(format_: str) -> None:
    if format_ == "AVIF" and not has_avif():
        pytest.skip("this Pillow has no AVIF")
    first, second = photograph(), ImageOps.invert(photograph())
    data = saved(first, format_, save_all=True, append_images=[second])
    with opened(data) as image:
        assert image.n_frames == 2  # type: ignore[attr-defined]
    pixels = decoded(data)
    np.testing.assert_array_equal(pixels, by_processor(data))
    assert np.abs(pixels.astype(int) - np.asarray(first)).mean() < 20
    assert np.abs(pixels.astype(int) - np.asarray(second)).mean() > 40


def test_a_default_image_that_is_no_frame_is_what_is_taken() -> None:
    first, second = photograph(), ImageOps.invert(photograph())
    data = saved(first, "PNG", save_all=True, append_images=[second], default_image=True)
    np.testing.assert_array_equal(decoded(data), np.asarray(first))


def test_colour_profiles_are_ignored_as_the_reference_ignores_them() -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for format_ in ("JPEG", "PNG", "WEBP", "TIFF"):
        tagged = saved(photograph(), format_, icc_profile=profile)
        assert tagged != saved(photograph(), format_)
        np.testing.assert_array_equal(decoded(tagged), decoded(saved(photograph(), format_)))
        np.testing.assert_array_equal(decoded(tagged), by_loader(tagged))


def test_pil_images_have_the_pixels_of_the_processor() -> None:
    modes = ("1", "L", "P", "RGB", "CMYK", "YCbCr", "HSV")
    for picture in (see_through(), see_through().convert("LA"), *(photograph().convert(mode) for mode in modes)):
        media = describe(picture, 0, 1 << 24)
        pixels = np.empty((picture.height, picture.width, 3), np.uint8)
        OpenedMedia(media.kind, media.header, memoryview(media.raw), 10**6).fill(pixels)
        np.testing.assert_array_equal(pixels, convert_to_rgb(picture, return_numpy=True))


def test_good_and_bad_files_in_one_request(shared_sidecar: SidecarProcess, tmp_path: Path) -> None:
    good = saved(photograph(), "JPEG")
    sixteen = tmp_path / "sixteen.png"
    sixteen.write_bytes(png(np.full((4, 4, 1), 40_000), 16, GRAY))
    bomb = tmp_path / "bomb.png"
    bomb.write_bytes(saved(Image.new("1", (30_000, 30_000)), "PNG"))
    items: list[object] = [
        good, good[: len(good) // 2], sixteen, np.asarray(photograph()), bomb, b"no picture", tmp_path / "missing",
        saved(see_through(), "PNG"), photograph(), Image.new("F", (4, 4)), saved(photograph(), "PNG"), object(),
    ]  # fmt: skip
    wrong = {
        1: (UndecodableImage, "bytes", "truncated"),
        2: (UnsupportedMode, str(sixteen), "I;16"),
        4: (ImageTooLarge, str(bomb), r"900000000 pixels\), the limit is 100000000 \(max_pixels\)"),
        5: (UndecodableImage, "bytes", "not a picture"),
        6: (UnreadableItem, str(tmp_path / "missing"), "No such file"),
        9: (UnsupportedMode, "PIL image 4×4 F", "'F'"),
        11: (UnsupportedItem, "", "is not an item"),
    }
    with shared_sidecar.connect() as client:
        results = client.encode(items, errors="return")
        for index, result in enumerate(results):
            if index in wrong:
                kind, source, reason = wrong[index]
                assert type(result) is kind
                assert isinstance(result, ItemError)
                assert (result.index, result.source) == (index, source)
                with pytest.raises(kind, match=reason):
                    raise result
            else:
                assert isinstance(result, mmcache.Lease), result
        leases = [result for result in results if isinstance(result, mmcache.Lease)]
        assert len(leases) == len(items) - len(wrong)
        shown = {str(lease.key): lease.numpy().tobytes() for lease in (results[3], results[8], results[10])}
        assert len(shown) == 3, "an array, a PIL image and a file have keys of their own"
        assert len(set(shown.values())) == 1, "and the same embedding: the pixels are the same"
        for lease in leases:
            lease.release()
