"""A bound on TIFF directories, checked before Pillow reads them. EXIF data is such a directory too.

Pillow copies every value of a directory. A directory may name 65,535 values, BigTIFF more, and all of them may be the
same bytes of the file, so a small file can ask for any amount of memory.
"""

from __future__ import annotations

import struct

from mmcache.errors import UndecodableImage

MIN_VALUES_BYTES = 1 << 16
"""Values of a directory may be this long together, and longer if the file is: honest values do not overlap."""

MAX_NUMBERS = 1 << 21
"""Most numbers in the values of a directory (offsets and lengths of a million strips); each becomes an object."""

_UNIT_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
_TEXT_TYPES = {1, 2, 6, 7}
_ORDERS = {b"II": "<", b"MM": ">"}


def check_directory(data: bytes | memoryview, max_numbers: int = MAX_NUMBERS) -> None:
    """Check the first directory of a TIFF file or of EXIF data; anything that is neither passes.

    Raises:
        UndecodableImage: its values are longer than the data, or more than a picture needs.
    """
    order = _ORDERS.get(bytes(data[:2]))
    if order is None or len(data) < 16:
        return
    is_big = data[2] == 43  # as Pillow has it
    (start,) = struct.unpack_from(f"{order}Q" if is_big else f"{order}L", data, 8 if is_big else 4)
    num_bytes, num_numbers = _totals(data, start, order, is_big)
    limit = max(len(data), MIN_VALUES_BYTES)
    if num_bytes > limit:
        raise UndecodableImage(f"the values of its TIFF directory have more than {limit} bytes together")
    if num_numbers > max_numbers:
        raise UndecodableImage(f"its TIFF directory holds more than {max_numbers} numbers")


def _totals(data: bytes | memoryview, start: int, order: str, is_big: bool) -> tuple[int, int]:
    """Bytes and numbers of the values until the limits are passed; ends where Pillow does, at the end of the data."""
    head = struct.Struct(f"{order}Q" if is_big else f"{order}H")
    entry = struct.Struct(f"{order}HHQQ" if is_big else f"{order}HHLL")
    num_bytes = num_numbers = 0
    if start + head.size > len(data):
        return 0, 0
    (num_entries,) = head.unpack_from(data, start)
    first = start + head.size
    num_entries = min(num_entries, (len(data) - first) // entry.size)
    for index in range(num_entries):
        _, kind, count, offset = entry.unpack_from(data, first + index * entry.size)
        nbytes = _UNIT_BYTES.get(kind, 0) * count
        if nbytes <= (8 if is_big else 4):
            continue
        if offset + nbytes > len(data):
            break
        num_bytes += nbytes
        num_numbers += 0 if kind in _TEXT_TYPES else count
        if num_bytes > max(len(data), MIN_VALUES_BYTES) or num_numbers > MAX_NUMBERS:
            break
    return num_bytes, num_numbers
