"""First launch: the horizontal pass of every frame whose width changes, into scratch of 32 bits a pixel."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from encoder.kernels.resize_parts import (
    ACROSS_TABLE,
    ACROSS_TAPS,
    FIRST_ACROSS_TILE,
    HEIGHT,
    NEW_WIDTH,
    SCRATCH,
    WIDTH,
    across,
    find_frame,
    number,
    pointer,
    source_words,
)


@triton.jit(do_not_specialize=["num_frames"])
def resize_across(plan, num_frames, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """One program a tile of `ROWS` source rows and `COLUMNS` output columns; red is a word's lowest byte."""
    tile = tl.program_id(0)
    frame = plan + find_frame(plan + FIRST_ACROSS_TILE * num_frames, num_frames, tile)
    tile -= number(frame, num_frames, FIRST_ACROSS_TILE)
    width = number(frame, num_frames, WIDTH)
    new_width = number(frame, num_frames, NEW_WIDTH)
    tiles_a_row = tl.cdiv(new_width, COLUMNS)
    row = (tile // tiles_a_row) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tile % tiles_a_row) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < number(frame, num_frames, HEIGHT)) & (column < new_width)
    table = pointer(frame, num_frames, ACROSS_TABLE, tl.int32) + tl.minimum(column, new_width - 1)
    words, odd, num_words = source_words(frame, num_frames)
    at = odd + 3 * (row * width + tl.load(table))
    taps = number(frame, num_frames, ACROSS_TAPS)
    red, green, blue = across(words, num_words, at, table + new_width, new_width, taps, inside)
    scratch = pointer(frame, num_frames, SCRATCH, tl.int32)
    tl.store(scratch + row * new_width + column, red | (green << 8) | (blue << 16), mask=inside)
