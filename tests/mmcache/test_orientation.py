"""EXIF orientation, the way of the reference's `load_image`, and what happens when it cannot be read."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, TiffImagePlugin, features

from mmcache.images.orientation import TURNS
from mmcache.media import describe
from mmcache.server.pixels import OpenedMedia
from tests.mmcache.picture_files import RGB, by_loader, chunk, decoded, exif, photograph, png, saved
from tests.mmcache.support import SidecarProcess

XMP = '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format_", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF", "MPO"])
def test_files_are_turned_as_the_reference_turns_them(format_: str, orientation: int) -> None:
    if format_ == "AVIF" and not features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    data = saved(photograph(), format_, exif=exif(orientation))
    pixels = decoded(data)
    assert pixels.shape == ((96, 64, 3) if orientation >= 5 else (64, 96, 3))
    np.testing.assert_array_equal(pixels, by_loader(data))
    stored = Image.fromarray(decoded(data, orientation="ignore"))
    assert stored.size == (96, 64)
    assert np.abs(np.asarray(stored).astype(int) - np.asarray(photograph())).mean() < 20
    turned = stored.transpose(TURNS[orientation]) if orientation > 1 else stored
    np.testing.assert_array_equal(pixels, np.asarray(turned))


@pytest.mark.parametrize("compression", ["raw", "tiff_lzw", "jpeg"])
def test_tiffs_read_by_libtiff_are_turned_once(compression: str) -> None:
    data = saved(photograph(), "TIFF", exif=exif(6), compression=compression)
    np.testing.assert_array_equal(decoded(data), by_loader(data))
    assert decoded(data, orientation="ignore").shape == (64, 96, 3)


def test_xmp_stands_in_for_exif() -> None:
    files = [saved(photograph(), format_, xmp=XMP.encode()) for format_ in ("JPEG", "WEBP")]
    tags = TiffImagePlugin.ImageFileDirectory_v2()
    tags[700] = XMP.encode()
    for data in (*files, saved(photograph(), "TIFF", tiffinfo=tags)):
        assert decoded(data).shape == (96, 64, 3)
        np.testing.assert_array_equal(decoded(data), by_loader(data))
        assert decoded(data, orientation="ignore").shape == (64, 96, 3)


def _exif_chunk(orientation: int) -> bytes:
    return chunk(b"eXIf", exif(orientation).tobytes().removeprefix(b"Exif\0\0"))


def test_png_metadata_counts_before_and_after_the_pixels() -> None:
    values = np.asarray(photograph())
    text = chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP.encode())
    profile = exif(6).tobytes()
    raw = b"\nexif\n%8d\n%s" % (len(profile), profile.hex().encode())
    for metadata in (_exif_chunk(6), text, chunk(b"tEXt", b"Raw profile type exif\0" + raw)):
        for data in (png(values, 8, RGB, before=metadata), png(values, 8, RGB, after=metadata)):
            assert decoded(data).shape == (96, 64, 3)
            np.testing.assert_array_equal(decoded(data), by_loader(data))
    both = png(values, 8, RGB, before=_exif_chunk(6), after=_exif_chunk(3))
    np.testing.assert_array_equal(decoded(both), by_loader(both))
    unrelated = png(values, 8, RGB, after=chunk(b"tEXt", b'Comment\0tiff:Orientation="6"'))
    np.testing.assert_array_equal(decoded(unrelated), values)


def _jpeg_with_exif(payload: bytes) -> bytes:
    segment = b"Exif\0\0" + payload
    data = saved(photograph(), "JPEG")
    return data[:2] + b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment + data[2:]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"nonsense, not a directory",
        b"II*\0\xff\xff\xff\x7f",
        b"II*\0\x08\0\0\0\xff\xff",
        b"II*\0\x08\0\0\0\x01\0" + struct.pack("<HHII", 0x0112, 3, 1, 9) + bytes(4),
        b"II*\0\x08\0\0\0\x01\0" + struct.pack("<HHII", 0x0112, 3, 1, 0) + bytes(4),
        b"II*\0\x08\0\0\0\x01\0" + struct.pack("<HHII", 0x0112, 3, 1000, 9) + bytes(4),
        b"II*\0\x08\0\0\0\x01\0" + struct.pack("<HHI4s", 0x0112, 2, 2, b"6\0") + bytes(4),
        b"II+\0\x08\0\0\0",
    ],
)
def test_broken_exif_means_upright(payload: bytes) -> None:
    upright = decoded(saved(photograph(), "JPEG"))
    np.testing.assert_array_equal(decoded(_jpeg_with_exif(payload)), upright)
    values = np.asarray(photograph())
    for data in (
        png(values, 8, RGB, before=chunk(b"eXIf", payload)),
        png(values, 8, RGB, after=chunk(b"eXIf", payload)),
        png(values, 8, RGB, before=chunk(b"tEXt", b"Raw profile type exif\0\nexif\n3\nzz")),
        png(values, 8, RGB, after=chunk(b"tEXt", b"Raw profile type exif\0\nexif\n3\nzz")),
    ):
        np.testing.assert_array_equal(decoded(data), values)


def test_exif_that_asks_for_much_memory_means_upright() -> None:
    entry = struct.pack("<HHII", 0x010E, 2, 200_000, 8)
    bomb = b"II*\0\x08\0\0\0" + struct.pack("<H", 20_000) + entry * 20_000
    values = np.asarray(photograph())
    np.testing.assert_array_equal(decoded(png(values, 8, RGB, before=chunk(b"eXIf", bomb))), values)


def test_pil_images_are_taken_as_they_stand(tmp_path: Path) -> None:
    """The reference's processor does not turn what it is given as an image either."""
    path = tmp_path / "turned.jpg"
    path.write_bytes(saved(photograph(), "JPEG", exif=exif(6)))
    with Image.open(path) as picture:
        media = describe(picture, 0, 1 << 24)
        opened = OpenedMedia(media.kind, media.header, memoryview(media.raw), 10**6)
        assert (opened.width, opened.height) == picture.size == (96, 64)
        del picture.info["exif"]
        assert describe(picture, 0, 1 << 24)[:3] == media[:3], "so it is no part of the key"


def test_the_setting_reaches_the_decoder_and_the_fingerprint(shared_sidecar: SidecarProcess, tmp_path: Path) -> None:
    data = saved(photograph(), "JPEG", exif=exif(6))
    turned, stored = decoded(data), decoded(data, orientation="ignore")
    with SidecarProcess(tmp_path, orientation="ignore") as other, other.connect() as client:
        for lease, same in (client.encode([data]) + client.encode([stored]),):
            with lease, same:
                assert lease.grid_thw == same.grid_thw == (1, 6, 8)
                np.testing.assert_array_equal(lease.numpy(), same.numpy())
        fingerprint = client.stats()["fingerprint"]
    with shared_sidecar.connect() as client:
        for lease, same in (client.encode([data]) + client.encode([turned]),):
            with lease, same:
                assert lease.grid_thw == same.grid_thw == (1, 8, 6)
                np.testing.assert_array_equal(lease.numpy(), same.numpy())
        assert client.stats()["fingerprint"] != fingerprint
