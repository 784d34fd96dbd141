"""Sizes as people write them."""

from __future__ import annotations

import re
from decimal import Decimal

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{binary}B": (1024 if binary else 1000) ** power
    for power, letter in enumerate("KMGT", start=1)
    for binary in ("", "I")
}
_SIZE = re.compile(r"(\d{1,20}(?:\.\d{1,6})?)\s*([A-Z]*)", re.ASCII)


def parse_size(value: object) -> int:
    """Bytes in `value`: a whole number, or text such as "512MiB", "4 GiB", "1.5GB". Raises ValueError otherwise."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value.strip().upper()) if isinstance(value, str) else None
    if match and (unit := _UNITS.get(match[2])) and (size := Decimal(match[1]) * unit) == int(size):
        return int(size)
    raise ValueError("must be a size such as 512MiB, 4GiB or a whole number of bytes")
