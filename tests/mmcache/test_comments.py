"""Comments and other idle bytes of GIF and PNM: as many as a picture has are read, as many as take time are refused."""

from __future__ import annotations

import numpy as np
import pytest

from mmcache.errors import UndecodableImage
from mmcache.images.comments import (
    MAX_COMMENT_BLOCKS,
    MAX_EXTENSION_BLOCKS,
    MAX_JUNK_BYTES,
    MAX_PNM_HEADER_BYTES,
)
from tests.mmcache.picture_files import decoded, photograph, saved

COMMENT = b"!\xfe\1a\0"
ODD_EXTENSIONS = [
    b"!\xf9\0" + b"\5hello\0",  # no end for Pillow: the empty block comes first
    b"!\xff\x0bNETSCAPE2.0\3\1\0\0\0",
    b"!\xff\x0bNETSCAPE2.0\0\5hello\0",
    b"!\xfe\0",
    b"!\x01\1,\1;\0",
    b"!\xfe\3!,;\0",
    b"junk",
]


def gif(*before: bytes) -> bytes:
    """A GIF with something before its frame."""
    data = saved(photograph().quantize(16), "GIF")
    start = 13 + (3 << (data[10] & 7) + 1)
    return data[:start] + b"".join(before) + data[start:]


def ppm(header: bytes) -> bytes:
    return b"P6" + header + np.asarray(photograph()).tobytes()


def test_comments_of_a_gif_are_bounded() -> None:
    for comments in (COMMENT * MAX_COMMENT_BLOCKS, b"!\xfe" + b"\1a" * MAX_COMMENT_BLOCKS + b"\0"):
        np.testing.assert_array_equal(decoded(gif(comments)), decoded(gif()))
        with pytest.raises(UndecodableImage, match="comments have more than"):
            decoded(gif(comments, COMMENT))
    with pytest.raises(UndecodableImage, match="comments have more than"):
        decoded(gif(b"!\xfe\0" * (MAX_COMMENT_BLOCKS + 1)))


@pytest.mark.parametrize("odd", ODD_EXTENSIONS)
def test_comments_behind_other_extensions_are_seen(odd: bytes) -> None:
    np.testing.assert_array_equal(decoded(gif(odd, COMMENT)), decoded(gif()))
    with pytest.raises(UndecodableImage, match="comments have more than"):
        decoded(gif(odd, COMMENT * (MAX_COMMENT_BLOCKS + 1)))


def test_other_bytes_before_a_frame_are_bounded() -> None:
    xmp = b"!\xff\x0bXMP DataXMP" + b"\1x" * 9000 + b"\0"
    np.testing.assert_array_equal(decoded(gif(xmp)), decoded(gif()))
    for idle in (b"!\xff" + b"\1x" * (MAX_EXTENSION_BLOCKS + 1) + b"\0", bytes(MAX_JUNK_BYTES + 1)):
        with pytest.raises(UndecodableImage, match="come before its first frame"):
            decoded(gif(idle))


@pytest.mark.parametrize("end", range(0, 60, 7))
def test_a_gif_that_ends_before_its_frame(end: int) -> None:
    data = gif(COMMENT, *ODD_EXTENSIONS)
    with pytest.raises(UndecodableImage):
        decoded(data[: 13 + 48 + end])


def test_the_header_of_a_pnm_is_bounded() -> None:
    plain = ppm(b" 96 64 255\n")
    for header in (
        b"\n#" + b"x" * (MAX_PNM_HEADER_BYTES - 100) + b"\n96 64\n255\n",
        b"\n#\r#\n9#a number goes on after a comment\n6 64#\n\n255\n",
        b" " * 1000 + b"96\t64\t255\t",
    ):
        np.testing.assert_array_equal(decoded(ppm(header)), decoded(plain))
    for idle in (b"\n#" + b"x" * MAX_PNM_HEADER_BYTES, b" " * MAX_PNM_HEADER_BYTES, b"#\n" * MAX_PNM_HEADER_BYTES):
        for before, after in ((b" ", b"\n96 64 255\n"), (b" 96 64 ", b"\n255\n")):
            with pytest.raises(UndecodableImage, match="its header has more than"):
                decoded(ppm(before + idle + after))
    with pytest.raises(UndecodableImage, match="its header has more than"):
        decoded(ppm(b" 96 6#" + b"x" * MAX_PNM_HEADER_BYTES + b"\n4 255\n"))


def test_comments_of_a_plain_pnm_are_bounded() -> None:
    numbers = b"".join(b"%d " % (index % 256) for index in range(192))
    few, many = (b"P3 8 8 255\n" + b"#\n" * number + numbers for number in (MAX_COMMENT_BLOCKS, MAX_COMMENT_BLOCKS + 1))
    np.testing.assert_array_equal(decoded(few).reshape(-1), np.arange(192))
    with pytest.raises(UndecodableImage, match="comments"):
        decoded(many)
