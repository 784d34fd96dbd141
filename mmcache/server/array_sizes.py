"""The size of an array by its header alone, which is tiny and made by a client: no pixel is looked at."""

from __future__ import annotations

import math
from typing import TypeAlias

from pydantic import ValidationError

from mmcache.errors import ImageTooLarge
from mmcache.images.bounds import check_chunk
from mmcache.media import ARRAY, ArrayHeader

Size: TypeAlias = "tuple[int, int, int]"
"""Height, width and number of frames; 0 for a picture."""

MAX_KNOWN = 256
"""Headers whose size is remembered; pictures of one source have a few of them."""


def sides(shape: tuple[int, ...]) -> Size:
    """What a shape that `ArrayHeader` allows says."""
    return (shape[1], shape[2], shape[0]) if len(shape) == 4 else (shape[0], shape[1], 0)


def array_bytes(header: bytes, max_pixels: int) -> tuple[Size, int]:
    """The size of an array, and the bytes that it fills.

    Raises:
        ValidationError, ImageTooLarge: the header is none, or beyond the limit.
    """
    shape = ArrayHeader.model_validate_json(header).shape
    height, width, num_frames = size = sides(shape)
    check_chunk(max(1, num_frames), width, height, max_pixels)
    return size, math.prod(shape)


class ArraySizes:
    """Sizes of items, as far as they can be known before a decoder has seen them."""

    def __init__(self, max_pixels: int) -> None:
        self._max_pixels = max_pixels
        self._known: dict[tuple[bytes, int], Size | None] = {}

    def of(self, kind: str, header: bytes, nbytes: int) -> Size | None:
        """The size of an array that is what it should be; None of anything else, which a decoder will look at."""
        if kind != ARRAY:
            return None
        try:
            return self._known[header, nbytes]
        except KeyError:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            size = self._known[header, nbytes] = self._read(header, nbytes)
            return size

    def _read(self, header: bytes, nbytes: int) -> Size | None:
        try:
            size, expected = array_bytes(header, self._max_pixels)
        except (ValidationError, ImageTooLarge):
            return None
        return size if expected == nbytes else None
