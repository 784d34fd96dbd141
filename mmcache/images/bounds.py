"""The limits on a picture's size, which client and decoder share. Free of Pillow."""

from __future__ import annotations

from mmcache.errors import ImageTooLarge, UndecodableImage


def check_size(width: int, height: int, max_pixels: int) -> None:
    """Refuse a picture without pixels or beyond the limit.

    Raises:
        UndecodableImage, ImageTooLarge: the second names size and limit.
    """
    if width < 1 or height < 1:
        raise UndecodableImage(f"a picture of {width}×{height} has no pixels")
    if width * height > max_pixels:
        reason = f"{width}×{height} is {width * height} pixels, the limit is {max_pixels} (max_pixels)"
        raise ImageTooLarge(reason)


def check_chunk(num_frames: int, width: int, height: int, max_pixels: int) -> None:
    """Refuse a video chunk whose frames together are beyond the limit.

    Raises:
        ImageTooLarge: names size and limit.
    """
    num_pixels = num_frames * width * height
    if num_pixels > max_pixels:
        what = f"{num_frames} frames of {width}×{height} are {num_pixels} pixels"
        raise ImageTooLarge(f"{what}, the limit is {max_pixels} for all together (max_pixels)")
