"""Arrays: pictures and video chunks that come as pixels, so that there is nothing to decode."""

from __future__ import annotations

from typing import Any

import numpy as np

from mmcache.errors import UnsupportedItem
from mmcache.images.bounds import check_chunk, check_size
from mmcache.media import ArrayHeader


class OpenedArray:
    """Pixels under their shape.

    Attributes:
        width, height: of the picture, or of each frame.
        num_frames: of a video chunk; 0 for a picture.
    """

    def __init__(self, fields: ArrayHeader, raw: memoryview, max_pixels: int) -> None:
        """Lay `raw`, which is only read, out as the header says.

        Raises:
            ImageTooLarge: more pixels than `max_pixels`, those of all frames together.
            UnsupportedItem: the header does not match the bytes.
        """
        shape = fields.shape
        self.num_frames = shape[0] if len(shape) == 4 else 0
        self.height, self.width = shape[:2] if len(shape) < 4 else shape[1:3]
        if self.num_frames:
            check_chunk(self.num_frames, self.width, self.height, max_pixels)
        else:
            check_size(self.width, self.height, max_pixels)
        num_channels = 1 if len(shape) == 2 else 3
        if max(1, self.num_frames) * self.height * self.width * num_channels != raw.nbytes:
            raise UnsupportedItem(f"an array of shape {shape} does not fill {raw.nbytes} bytes")
        array = np.frombuffer(raw, np.uint8).reshape(shape)
        self._array = array[..., None] if num_channels == 1 else array

    def fill(self, pixels: np.ndarray[Any, Any]) -> None:
        """Copy into `pixels`, uint8 RGB; a gray picture goes into every channel."""
        np.copyto(pixels, self._array)
