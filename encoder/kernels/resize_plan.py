"""What the kernels are told of each frame: one column of int64 a frame, one line for each field below."""

from typing import Final, NamedTuple


class FrameFields(NamedTuple):
    """Addresses are of the device, in bytes; sizes in pixels; 0 stands for what a frame has not, or not yet."""

    width: int
    height: int
    new_width: int
    new_height: int
    grid_width: int
    grid_height: int
    across_table: int
    """Weights of the horizontal pass (`encoder.kernels.resize_tables`); none if the width stays."""
    across_taps: int
    down_table: int
    down_taps: int
    source: int = 0
    """uint8 `[height, width, 3]`, at any byte."""
    scratch: int = 0
    """32 bits a pixel, `[height, new_width]`: what the first launch leaves to the second."""
    first_across_tile: int = 0
    first_finish_tile: int = 0
    first_patch: int = 0


MAX_FRAME_BYTES: Final = 2**31 - 2**20
"""Offsets inside a frame are 32 bits wide, with room for a window's end."""


def line(field: str) -> int:
    """Return the line of a field."""
    return FrameFields._fields.index(field)
