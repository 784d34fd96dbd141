"""What a JPEG says before its pixels, found without Pillow, which reads directories while it opens a file.

Bounded: Pillow joins segments, strips prefixes and steps over padding in ways that take the square of their number.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

from PIL.JpegImagePlugin import MARKER

from mmcache.errors import UndecodableImage
from mmcache.images.tiff_directory import check_directory

PREFIX = b"Exif\0\0"
MAX_PREFIXES = 8
MAX_EXIF_BYTES = 8 << 20
MAX_EXIF_SEGMENTS = 256
"""Twice as many as `MAX_EXIF_BYTES` fill."""

MAX_SEGMENTS = 1 << 16
MAX_PADDING_BYTES = 1 << 20
MAX_MPF_NUMBERS = 4096
MAX_SCANS = 100
"""Each goes over the whole picture. Encoders make about ten."""

_APP1, _APP2, _START_OF_SCAN = 0xFFE1, 0xFFE2, 0xFFDA
_MPF = b"MPF\0"
_FRAMES = {0xFFC0: 2, 0xFFC1: 2, 0xFFC2: 1}
"""Start of a Huffman-coded frame, and the least bits that a block of 8×8 takes in it."""
_MARKER_AND_LENGTH = struct.Struct(">HH")
_NEXT_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
"""In the pixels' data: there a byte of all ones is followed by zero or is part of a restart marker."""

_END_OF_IMAGE, _TEMPORARY = 0xFFD9, 0xFF01


def check_jpeg(raw: memoryview) -> None:
    """Check a JPEG before Pillow reads it; anything else passes.

    Raises:
        UndecodableImage: more of something than a picture needs.
    """
    if bytes(raw[:3]) != b"\xff\xd8\xff":
        return
    end = raw.nbytes
    for marker, start, stop in _segments(raw):
        end = stop
        if marker == _APP2 and bytes(raw[start : start + len(_MPF)]) == _MPF:
            check_directory(raw[start + len(_MPF) : stop], MAX_MPF_NUMBERS)
    check_directory(without_prefixes(collected_exif(raw)))
    _check_scans(raw, end)


def check_jpeg_length(raw: memoryview) -> None:
    """Check that a JPEG has as many bytes as its pixels take at least.

    Raises:
        UndecodableImage: it has not; libjpeg would make the rest gray.
    """
    if bytes(raw[:3]) != b"\xff\xd8\xff":
        return
    num_bits, end = 0, raw.nbytes
    for marker, start, stop in _segments(raw):
        end = stop
        if marker in _FRAMES:
            num_bits = _num_blocks(raw[start:stop]) * _FRAMES[marker]
    if (left := max(0, raw.nbytes - end)) * 8 < num_bits:
        raise UndecodableImage(f"truncated: {left} bytes are too few for the pixels that its header says")


def collected_exif(raw: memoryview) -> bytes:
    """EXIF data of all segments before the pixels, joined as Pillow does; empty if it has none.

    Raises:
        UndecodableImage: it is longer than a picture's.
    """
    if bytes(raw[:3]) != b"\xff\xd8\xff":
        return b""
    parts = [raw[start:stop] for marker, start, stop in _segments(raw) if marker == _APP1]
    exif = [part[len(PREFIX) :] for part in parts if bytes(part[: len(PREFIX)]) == PREFIX]
    if sum(part.nbytes for part in exif) > MAX_EXIF_BYTES or len(exif) > MAX_EXIF_SEGMENTS:
        raise UndecodableImage(f"its EXIF data has more than {MAX_EXIF_BYTES} bytes or {MAX_EXIF_SEGMENTS} segments")
    return b"".join(exif)


def without_prefixes(exif: bytes) -> bytes:
    """EXIF data from its directory on.

    Raises:
        UndecodableImage: it has more prefixes before that than can be an accident.
    """
    start = 0
    while exif.startswith(PREFIX, start):
        start += len(PREFIX)
        if start > MAX_PREFIXES * len(PREFIX):
            raise UndecodableImage(f"its EXIF data begins with more than {MAX_PREFIXES} prefixes")
    return exif[start:]


def _segments(raw: memoryview) -> Iterator[tuple[int, int, int]]:
    """Marker, start and end of the data of each segment before the pixels, as Pillow walks over them."""
    offset, num_padding, num_segments = 2, 0, 0
    while offset + _MARKER_AND_LENGTH.size <= raw.nbytes:
        marker, nbytes = _MARKER_AND_LENGTH.unpack_from(raw, offset)
        if marker >> 8 != 0xFF or marker == 0xFFFF:  # junk, or padding before a marker
            offset += 1
            num_padding += 1
        elif marker == 0xFF00:
            offset += 2
            num_padding += 2
        elif marker not in MARKER:
            break
        elif MARKER[marker][2] is None:  # stands alone
            offset += 2
            num_padding += 2
        else:
            num_segments += 1
            start, offset = offset + 4, offset + 2 + max(nbytes, 2)
            yield marker, start, offset
            if marker == _START_OF_SCAN:
                break
        if num_padding > MAX_PADDING_BYTES:
            raise UndecodableImage(f"more than {MAX_PADDING_BYTES} bytes between its segments belong to none")
        if num_segments > MAX_SEGMENTS:
            raise UndecodableImage(f"more than {MAX_SEGMENTS} segments come before its pixels")


def _num_blocks(frame: memoryview) -> int:
    """Blocks of 8×8 that a frame header promises; 0 if it is broken, which Pillow will say."""
    if frame.nbytes < 6:
        return 0
    _, height, width, num_components = struct.unpack_from(">BHHB", frame)
    if frame.nbytes < 6 + 3 * num_components:
        return 0
    sampling = [divmod(frame[7 + 3 * index], 16) for index in range(num_components)]
    widest, highest = max((h for h, _ in sampling), default=0), max((v for _, v in sampling), default=0)
    if not widest or not highest:
        return 0
    return sum(-(-width * h // (8 * widest)) * -(-height * v // (8 * highest)) for h, v in sampling)


def _check_scans(raw: memoryview, start: int) -> None:
    """Walk as libjpeg does over scans and what lies between them, to the end of the image: phones append films."""
    offset, num_scans, num_segments = start, 1, 0
    while (found := _NEXT_MARKER.search(raw, offset)) is not None:
        offset = found.start()
        if offset + _MARKER_AND_LENGTH.size > raw.nbytes:
            return
        marker, nbytes = _MARKER_AND_LENGTH.unpack_from(raw, offset)
        if marker == _END_OF_IMAGE:
            return
        offset += 2 if marker == _TEMPORARY else 2 + max(nbytes, 2)
        num_scans, num_segments = num_scans + (marker == _START_OF_SCAN), num_segments + 1
        if num_scans > MAX_SCANS:
            raise UndecodableImage(f"it has more than {MAX_SCANS} scans")
        if num_segments > MAX_SEGMENTS:
            raise UndecodableImage(f"more than {MAX_SEGMENTS} segments come between its scans")
