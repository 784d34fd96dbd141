"""Which grids the model that is served can have: one rule for what clients bring ready made, embeddings and rows."""

from __future__ import annotations

from encoder.config import ProcessorConfig
from encoder.sizing import Grid


def grid_fault(grid: Grid, processor: ProcessorConfig) -> str:
    """The rule that a grid breaks, in words; empty for every grid that the processor itself makes of any picture.

    Limits on patches are meant before padding to whole tiles. From a side of n patches padding and rounding took less
    than `merge_size + 1`; so much is forgiven here.
    """
    (t, h, w), merge = grid, processor.merge_size
    most = -(-processor.max_side // processor.tile) * merge
    if not 1 <= t <= processor.frames_per_chunk or any(n % merge or not merge <= n <= most for n in (h, w)):
        return f"1 to {processor.frames_per_chunk} frames, sides of {merge} to {most} patches in multiples of {merge}"
    limits = {"max_patches_per_frame": processor.max_patches_per_frame}
    if t == 1:  # a picture, or a chunk of one frame
        limits["max_patches"] = processor.max_patches
    name = max(limits, key=lambda name: limits[name])
    if max(0, h - merge - 1) * max(0, w - merge - 1) > limits[name]:
        return f"{h}×{w} are more than {limits[name]} patches before padding ({name})"
    return ""
