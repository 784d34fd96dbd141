"""Sizes as people write them."""

from __future__ import annotations

import re
from decimal import Decimal

_UNITS = {"B": 1} | {
    f"{letter}{binary}B": (1024 if binary else 1000) ** power
    for power, letter in enumerate("KMGT", start=1)
    for binary in ("", "i")
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", re.IGNORECASE | re.ASCII)
_SIZE_RULE = "a size such as 512MiB, 4GiB or a whole number of bytes"


def parse_size(value: object) -> int:
    """Bytes in `value`: a whole number, or text such as "512MiB", "4 GiB", "1.5GB". Raises ValueError otherwise."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    units = {unit.upper(): size for unit, size in _UNITS.items()}
    if match is None or (match[2].upper() or "B") not in units:
        raise ValueError(f"must be {_SIZE_RULE}")
    size = Decimal(match[1]) * units[match[2].upper() or "B"]
    if size != int(size):
        raise ValueError(f"must be {_SIZE_RULE}")
    return int(size)
