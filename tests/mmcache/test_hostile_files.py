"""Files that are made to take memory or time, and damage that a library only mumbles about."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import mmcache
from mmcache.errors import ItemError, UndecodableImage, UnreadableItem, UnsupportedItem, UnsupportedMode
from mmcache.images.jpeg_segments import (
    MAX_EXIF_SEGMENTS,
    MAX_PADDING_BYTES,
    MAX_PREFIXES,
    MAX_SCANS,
    MAX_SEGMENTS,
)
from mmcache.media import describe
from tests.mmcache.picture_files import RGB, chunk, decoded, exif, has_avif, photograph, png, saved, tiff
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


@pytest.mark.parametrize("num_prefixes", [0, 1, 2])
def test_directories_of_an_avif_are_bounded(num_prefixes: int) -> None:
    if not has_avif():
        pytest.skip("this Pillow has no AVIF")
    hostile = b"Exif\0\0" * num_prefixes + directory(500, 2, 5000)
    harmless = directory(0, 2, 0).ljust(len(hostile), b"\0")
    good = saved(photograph(), "AVIF", exif=b"Exif\0\0" + harmless)
    assert decoded(good).shape == (64, 96, 3)
    assert good.count(harmless) == 1
    for orientation in ("exif", "ignore"):
        with pytest.raises(UndecodableImage, match=r"directory|Invalid Exif"):
            decoded(good.replace(harmless, hostile), orientation=orientation)


def test_segments_are_bounded() -> None:
    jpeg = saved(photograph(), "JPEG")
    exif_segment = struct.pack(">HH", 0xFFE1, 9) + b"Exif\0\0a"
    for segment, number, says in (
        (exif_segment, MAX_EXIF_SEGMENTS, "EXIF data has more than"),
        (b"\xff\xe5\0\2", MAX_SEGMENTS - 50, "segments come before its pixels"),
        (b"\xff\xd0", MAX_PADDING_BYTES // 2, "belong to none"),
    ):
        np.testing.assert_array_equal(decoded(jpeg[:2] + segment * number + jpeg[2:]), decoded(jpeg))
        with pytest.raises(UndecodableImage, match=says):
            decoded(jpeg[:2] + segment * (number + 60) + jpeg[2:])


def test_scans_behind_what_looks_like_the_end_are_counted() -> None:
    progressive = saved(photograph(), "JPEG", progressive=True)
    last = progressive.rindex(b"\xff\xda")
    scan, comment = progressive[last:-2], b"\xff\xfe\0\4\xff\xd9"
    few, many = (progressive[:last] + comment + scan * number + progressive[-2:] for number in (5, MAX_SCANS))
    assert decoded(few).shape == (64, 96, 3)
    with pytest.raises(UndecodableImage, match=f"more than {MAX_SCANS} scans"):
        decoded(many)
    np.testing.assert_array_equal(  # what looks like scans in a comment is none
        decoded(progressive[:last] + b"\xff\xfe\1\2" + b"\xff\xda" * 128 + progressive[last:]), decoded(progressive)
    )
    with pytest.raises(UndecodableImage, match="come between its scans"):
        decoded(progressive[:last] + b"\xff\xfe\0\2" * (MAX_SEGMENTS + 1) + progressive[last:])


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
    twelve = Image.new("P", (64, 64), 12)  # the byte that begins a palette
    twelve.putpalette(photograph().convert("P").getpalette() or b"")
    noisy = twelve.copy()
    noisy.putdata([(12, 13)[index % 2] for index in range(64 * 64)])
    for picture in (twelve, noisy):
        data = saved(picture, "PCX")
        np.testing.assert_array_equal(decoded(data), np.asarray(picture.convert("RGB")))
        for num_cut in (*range(1, 60), 767, 768, 769, 770):
            with pytest.raises(UndecodableImage):
                decoded(data[:-num_cut])


def test_a_gray_pcx_has_no_palette() -> None:
    data = bytearray(saved(photograph().convert("L"), "PCX")[:-769])
    data[68] = 2
    np.testing.assert_array_equal(decoded(bytes(data))[..., 0], np.asarray(photograph().convert("L")))


def test_formats_that_are_not_taken_are_named() -> None:
    for data, name in ((b"qoif" + bytes(20), "QOI"), (b"8BPS" + bytes(20), "PSD"), (b"\0\0\0\x18ftypheic", "HEIF")):
        with pytest.raises(UndecodableImage, match=name):
            decoded(data)
    with pytest.raises(UndecodableImage, match="a TIFF whose header is broken"):
        decoded(b"II*\0" + bytes(30))
    tags = {256: (4, 1, 4), 257: (4, 1, 4), 258: (3, 1, 64), 262: (3, 1, 1), 273: (4, 1, 8), 339: (3, 1, 3)}
    with pytest.raises(UnsupportedMode, match="kind of pixels"):
        decoded(tiff(tags, bytes(128)))


class OddPath:
    def __fspath__(self) -> str:
        raise RuntimeError("no path today")


def test_odd_paths_buffers_and_names_cost_one_item(client: mmcache.Client) -> None:
    with pytest.raises(UnreadableItem, match="no path today"):
        describe(OddPath(), 0, 1000)
    with pytest.raises(UnsupportedItem, match="one axis"):
        describe(np.zeros((4, 4)).data, 0, 1000)
    assert len(str(client.encode(["x" * 100_000], errors="return")[0])) < 1000
    results = client.encode([OddPath(), image(1)], errors="return")
    assert isinstance(results[0], UnreadableItem)
    results[1].release()


def test_a_file_that_hangs_the_decoder_fails_alone(tmp_path: Path) -> None:
    """Twice its time passes, in two decoders; the others wait for the first time at most."""
    slow = png(np.asarray(photograph()), 8, RGB, before=chunk(b"aaAa", b"") * 1_000_000)
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


def test_what_pillow_says_of_a_file_is_not_in_the_log(sidecar: SidecarProcess) -> None:
    many_samples = tiff({256: (4, 1, 4), 257: (4, 1, 4), 258: (3, 1, 8), 262: (3, 1, 1), 277: (3, 1, 9999)})
    with sidecar.connect() as client:
        assert isinstance(client.encode([many_samples], errors="return")[0], UndecodableImage)
    assert "samples" not in sidecar.log()


@pytest.mark.parametrize(
    ("mode", "transparency"),
    [
        ("RGB", (1, 2, 3, 4, 5)),
        ("RGB", b"\0\0\0"),
        ("L", b"\0\0\0"),
        ("L", (1, 2, 3, 4)),
        ("1", 10**30),
        ("P", 999),
        ("P", -1),
        ("P", 10**30),
        ("P", (1, 2, 3)),
    ],
)
def test_transparency_that_pillow_does_not_take(mode: str, transparency: object) -> None:
    picture = photograph().convert(mode)
    picture.info["transparency"] = transparency
    with pytest.raises(UnsupportedItem, match=f"transparency is not one that Pillow takes for mode '{mode}'") as caught:
        describe(picture, 3, 1 << 20)
    assert caught.value.index == 3
    del picture.info["transparency"]
    assert describe(picture, 3, 1 << 20).kind == "pil"


def test_memory_of_a_decoder_is_bounded(sidecar: SidecarProcess) -> None:
    limits = Path(f"/proc/{sidecar.stats()['decoders']['pids'][0]}/limits").read_text()
    (line,) = [line for line in limits.splitlines() if line.startswith("Max data size")]
    assert int(line.split()[3]) < 4 << 30
