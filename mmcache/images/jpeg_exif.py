"""The EXIF data of a JPEG as Pillow collects it, found without Pillow, which reads its directory while opening."""

from __future__ import annotations

import struct

from PIL.JpegImagePlugin import MARKER

_APP1, _START_OF_SCAN = 0xFFE1, 0xFFDA
_SIGNATURE = b"Exif\0\0"
_MARKER_AND_LENGTH = struct.Struct(">HH")


def collected_exif(raw: memoryview) -> bytes:
    """EXIF data of all segments before the pixels, joined; empty if `raw` is not a JPEG or has none."""
    if bytes(raw[:3]) != b"\xff\xd8\xff":
        return b""
    parts: list[bytes] = []
    offset = 2
    while offset + _MARKER_AND_LENGTH.size <= raw.nbytes:
        marker, nbytes = _MARKER_AND_LENGTH.unpack_from(raw, offset)
        if marker >> 8 != 0xFF or marker == 0xFFFF:  # junk, or padding before a marker
            offset += 1
        elif marker == 0xFF00:
            offset += 2
        elif marker == _START_OF_SCAN or marker not in MARKER:
            break
        elif MARKER[marker][2] is None:  # stands alone
            offset += 2
        else:
            start, offset = offset + 4, offset + 2 + max(nbytes, 2)
            if marker == _APP1 and bytes(raw[start : start + len(_SIGNATURE)]) == _SIGNATURE:
                parts.append(bytes(raw[start + len(_SIGNATURE) : offset]))
    return b"".join(parts)
