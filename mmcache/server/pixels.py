"""The decoder's half of an item: from its description and raw bytes to RGB pixels."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import numpy as np
from pydantic import ValidationError

from mmcache.errors import UnsupportedItem
from mmcache.images.files import Picture, open_file, rebuild_pil
from mmcache.media import ARRAY, IMAGE, PIL, ArrayHeader, PilHeader
from mmcache.server.arrays import OpenedArray
from mmcache.server.messages import pixels_shape

H = TypeVar("H", ArrayHeader, PilHeader)


class OpenedMedia:
    """The decoder's half: an item whose size is known and whose pixels are not decoded yet.

    Attributes:
        width, height: of the picture, or of each frame of a video chunk.
        num_frames: of a video chunk; 0 for a picture.

    Raises (constructor):
        UndecodableImage, UnsupportedMode, ImageTooLarge, UnsupportedItem: without an index; the client adds it.
    """

    def __init__(self, kind: str, header: bytes, raw: memoryview, max_pixels: int, orientation: str = "exif") -> None:
        self._source: OpenedArray | Picture
        if kind == ARRAY:
            self._source = OpenedArray(_parsed(ArrayHeader, header), raw, max_pixels)
        elif kind == IMAGE:
            self._source = open_file(raw, max_pixels, orientation)
        elif kind == PIL:
            self._source = rebuild_pil(_parsed(PilHeader, header), raw, max_pixels)
        else:
            raise UnsupportedItem(f"unknown kind of item {kind!r}")
        self.width, self.height = self._source.width, self._source.height
        self.num_frames = self._source.num_frames if isinstance(self._source, OpenedArray) else 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the RGB pixels: `[height, width, 3]`, of a video chunk `[num_frames, height, width, 3]`."""
        return pixels_shape(self.num_frames, self.height, self.width)

    @property
    def nbytes(self) -> int:
        """Bytes of the RGB pixels."""
        return math.prod(self.shape)

    def fill(self, pixels: np.ndarray[Any, Any]) -> None:
        """Decode into `pixels`, uint8 of `shape`.

        Raises:
            UndecodableImage: truncated or damaged.
        """
        self._source.fill(pixels)


def _parsed(model: type[H], header: bytes) -> H:
    try:
        return model.model_validate_json(header)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise UnsupportedItem(f"bad {model.__name__}: {first['loc']}: {first['msg']}") from error
