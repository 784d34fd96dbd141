"""Arrays as items, for the tests: their keys, and the pixels that the decoder makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from mmcache.keys import ContentKey, KeyHasher
from mmcache.media import describe
from mmcache.server.pixels import OpenedMedia

LIMIT = 1 << 24
Array = np.ndarray[Any, Any]


def key(item: object) -> ContentKey:
    media = describe(item, 0, LIMIT)
    return KeyHasher(1).key(media.kind, media.header, media.raw)


def decoded(item: object, max_pixels: int = 10**6) -> Array:
    media = describe(item, 0, LIMIT)
    opened = OpenedMedia(media.kind, media.header, memoryview(media.raw), max_pixels)
    pixels = np.empty(opened.shape, np.uint8)
    assert pixels.nbytes == opened.nbytes
    opened.fill(pixels)
    return pixels


def as_rgb(pixels: Array) -> Array:
    return np.stack([pixels] * 3, axis=-1) if pixels.ndim == 2 else pixels
