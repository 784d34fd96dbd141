"""Files that are made to take memory or time, and damage that a library only mumbles about."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import mmcache
from mmcache.errors import ItemError, UndecodableImage, UnreadableItem, UnsupportedItem
from mmcache.images.jpeg_segments import MAX_PADDING_BYTES, MAX_PREFIXES, MAX_SCANS
from mmcache.media import describe
from tests.mmcache.picture_files import decoded, exif, photograph, saved
from tests.mmcache.support import SidecarProcess, image


def with_segment(marker: int, payload: bytes) -> bytes:
    """A JPEG with one segment more, before all others."""
    jpeg = saved(photograph(), "JPEG")
    return jpeg[:2] + struct.pack(">HH", marker, 2 + len(payload)) + payload + jpeg[2:]


def directory(num_entries: int, kind: int, count: int) -> bytes:
    """A TIFF directory whose values are all the same bytes."""
    entry = struct.pack("<HHII", 0x010E, kind, count, 8)
    return b"II*\0\x08\0\0\0" + struct.pack("<H", num_entries) + entry * num_entries + bytes(2000)


@pytest.mark.parametrize("num_prefixes", [1, 2, 3, MAX_PREFIXES])
def test_directories_behind_any_number_of_prefixes_are_bounded(num_prefixes: int) -> None:
    with pytest.raises(UndecodableImage, match="directory"):
        decoded(with_segment(0xFFE1, b"Exif\0\0" * num_prefixes + directory(500, 2, 5000)))


def test_more_prefixes_than_can_be_an_accident() -> None:
    with pytest.raises(UndecodableImage, match="prefixes"):
        decoded(with_segment(0xFFE1, b"Exif\0\0" * 9000))
    data = saved(photograph(), "PNG", exif=b"Exif\0\0" * 200_000 + exif(6).tobytes().removeprefix(b"Exif\0\0"))
    np.testing.assert_array_equal(decoded(data), decoded(saved(photograph(), "PNG")))  # upright, and at once


@pytest.mark.parametrize(("kind", "count"), [(7, 10_000), (3, 5000)], ids=["bytes", "numbers"])
def test_directories_of_several_pictures_are_bounded(kind: int, count: int) -> None:
    with pytest.raises(UndecodableImage, match="directory"):
        decoded(with_segment(0xFFE2, b"MPF\0" + directory(1000, kind, count)))


def test_padding_and_scans_are_bounded() -> None:
    jpeg = saved(photograph(), "JPEG")
    with pytest.raises(UndecodableImage, match="belong to none"):
        decoded(jpeg[:2] + b"\xff" * (MAX_PADDING_BYTES + 10) + jpeg[2:])
    progressive = saved(photograph(), "JPEG", progressive=True)
    last = progressive.rindex(b"\xff\xda")
    scan = progressive[last:-2]
    few, many = (progressive[:-2] + scan * number + progressive[-2:] for number in (5, MAX_SCANS))
    assert decoded(few).shape == (64, 96, 3)
    with pytest.raises(UndecodableImage, match=f"more than {MAX_SCANS} scans"):
        decoded(many)
    film = progressive + b"\xff\xda" * 1000  # what phones append is no part of the picture
    np.testing.assert_array_equal(decoded(film), decoded(progressive))


@pytest.mark.parametrize("progressive", [False, True])
def test_a_header_that_promises_more_than_the_file_can_have(progressive: bool) -> None:
    jpeg = saved(photograph(), "JPEG", progressive=progressive)
    frame = jpeg.index(b"\xff\xc2" if progressive else b"\xff\xc0")
    lie = jpeg[: frame + 5] + struct.pack(">HH", 900, 900) + jpeg[frame + 9 :]
    with pytest.raises(UndecodableImage, match="too few for the pixels"):
        decoded(lie)
    flat = saved(Image.new("RGB", (2000, 2000)), "JPEG", progressive=progressive, quality=1, optimize=True)
    assert decoded(flat, 10_000_000).shape == (2000, 2000, 3)


@pytest.mark.parametrize("mode", ["YCbCr", "RGB"])
@pytest.mark.parametrize("compression", ["tiff_lzw", "tiff_adobe_deflate"])
def test_damage_that_libtiff_only_says_on_stderr(
    capfd: pytest.CaptureFixture[str], mode: str, compression: str
) -> None:
    good = saved(photograph().convert(mode), "TIFF", compression=compression)
    assert decoded(good).shape == (64, 96, 3)
    at = len(good) // 8
    with pytest.raises(ItemError):
        decoded(good[:at] + b"\xff" * 64 + good[at + 64 :])
    assert capfd.readouterr().err == ""


def test_a_pcx_without_its_palette() -> None:
    whole = saved(photograph().convert("P"), "PCX")
    assert decoded(whole).shape == (64, 96, 3)
    with pytest.raises(UndecodableImage, match="palette"):
        decoded(whole[:-741])


def test_formats_that_are_not_taken_are_named() -> None:
    for data, name in ((b"qoif" + bytes(20), "QOI"), (b"8BPS" + bytes(20), "PSD"), (b"\0\0\0\x18ftypheic", "HEIF")):
        with pytest.raises(UndecodableImage, match=name):
            decoded(data)
    with pytest.raises(UndecodableImage, match="kind of pixels"):
        decoded(b"II*\0" + bytes(30))


class OddPath:
    def __fspath__(self) -> str:
        raise RuntimeError("no path today")


def test_odd_paths_buffers_and_names_cost_one_item(client: mmcache.Client) -> None:
    with pytest.raises(UnreadableItem, match="no path today"):
        describe(OddPath(), 0, 1000)
    with pytest.raises(UnsupportedItem, match="one axis"):
        describe(memoryview(np.zeros((4, 4))), 0, 1000)
    assert len(str(client.encode(["x" * 100_000], errors="return")[0])) < 1000
    results = client.encode([OddPath(), image(1)], errors="return")
    assert isinstance(results[0], UnreadableItem)
    results[1].release()


def test_a_file_that_hangs_the_decoder_fails_alone(tmp_path: Path) -> None:
    """Twice its time passes, in two decoders; the others wait for the first time at most."""
    slow = b"P6 #" + b"x" * (40 << 20) + b"\n96 64 255\n" + bytes(96 * 64 * 3)
    with SidecarProcess(tmp_path, decode_timeout_s="0.5") as sidecar, sidecar.connect() as client:
        good = [saved(photograph().rotate(turn), "PNG") for turn in range(4)]
        results = client.encode([slow, *good], errors="return")
        assert isinstance(results[0], UndecodableImage)
        assert "two decoders" in results[0].reason
        for result in results[1:]:
            assert isinstance(result, mmcache.Lease), result
            result.release()
        handle = client.submit([slow], errors="return")
        time.sleep(0.8)  # it is in the second decoder: the first is free
        client.encode([image(5)])[0].release()
        assert isinstance(handle.result()[0], UndecodableImage)
        assert len(client.stats()["decoders"]["pids"]) <= 2


def test_memory_of_a_decoder_is_bounded(sidecar: SidecarProcess) -> None:
    limits = Path(f"/proc/{sidecar.stats()['decoders']['pids'][0]}/limits").read_text()
    (line,) = [line for line in limits.splitlines() if line.startswith("Max data size")]
    assert int(line.split()[3]) < 4 << 30
