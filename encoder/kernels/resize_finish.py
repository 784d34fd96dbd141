"""Last launch, often the only one: the vertical pass, then padding, normalising and cutting into patch rows."""

import triton
import triton.language as tl

from encoder.kernels.resize_parts import (
    ACROSS_TABLE,
    ACROSS_TAPS,
    DOWN_TABLE,
    DOWN_TAPS,
    FIRST_FINISH_TILE,
    FIRST_PATCH,
    GRID_HEIGHT,
    GRID_WIDTH,
    HEIGHT,
    NEW_HEIGHT,
    NEW_WIDTH,
    SCRATCH,
    SOURCE,
    UNIT,
    WIDTH,
    across,
    find_frame,
    level,
    number,
    pointer,
    source_words,
)


@triton.jit
def _pixels(frame, num_frames, row, column, inside):
    """Levels of three channels, after the horizontal pass, of pixels in source rows and output columns."""
    width = number(frame, num_frames, WIDTH)
    new_width = number(frame, num_frames, NEW_WIDTH)
    across_taps = number(frame, num_frames, ACROSS_TAPS)
    scratch = pointer(frame, num_frames, SCRATCH, tl.int32)
    if tl.load(frame + SCRATCH * num_frames) != 0:
        word = tl.load(scratch + row * new_width + column, mask=inside, other=0)
        red = word & 255
        green = (word >> 8) & 255
        blue = word >> 16
    elif across_taps != 0:
        table = pointer(frame, num_frames, ACROSS_TABLE, tl.int32) + tl.minimum(column, new_width - 1)
        words, odd, num_words = source_words(frame, num_frames)
        at = odd + 3 * (row * width + tl.load(table))
        red, green, blue = across(words, num_words, at, table + new_width, new_width, across_taps, inside)
    else:
        pixel = pointer(frame, num_frames, SOURCE, tl.uint8) + 3 * (row * width + column)
        red = tl.load(pixel, mask=inside, other=0).to(tl.int32)
        green = tl.load(pixel + 1, mask=inside, other=0).to(tl.int32)
        blue = tl.load(pixel + 2, mask=inside, other=0).to(tl.int32)
    return red, green, blue


@triton.jit
def _down(frame, num_frames, row, column, inside):
    """Levels of three channels of output pixels. Without a table, a row has one tap, itself."""
    height = number(frame, num_frames, HEIGHT)
    new_height = number(frame, num_frames, NEW_HEIGHT)
    taps = number(frame, num_frames, DOWN_TAPS)
    has_table = row < tl.where(taps != 0, new_height, 0)
    table = pointer(frame, num_frames, DOWN_TABLE, tl.int32) + row
    first = tl.load(table, mask=has_table, other=0)
    first = tl.where(taps != 0, first, row)
    red = tl.zeros(inside.shape, tl.int32)
    green = tl.zeros(inside.shape, tl.int32)
    blue = tl.zeros(inside.shape, tl.int32)
    for tap in range(tl.maximum(taps, 1)):
        weight = tl.load(table + (tap + 1) * new_height, mask=has_table, other=UNIT)
        r, g, b = _pixels(frame, num_frames, tl.minimum(first + tap, height - 1), column, inside)
        red += r * weight
        green += g * weight
        blue += b * weight
    return level(red), level(green), level(blue)


@triton.jit
def _store(rows, value, channels, CHANNEL: tl.constexpr, PATCH: tl.constexpr, mask):
    normalised = tl.div_rn(value.to(tl.float32) - tl.load(channels + CHANNEL), tl.load(channels + 3 + CHANNEL))
    tl.store(rows + CHANNEL * PATCH * PATCH, normalised.to(rows.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_frames", "out"])
def resize_finish(
    plan, num_frames, channels, out, PATCH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """One program a tile of `ROWS` by `COLUMNS` pixels of a padded frame.

    `channels` is float32 `[6]`: means, then deviations, of levels. `out` is `[num_patches, 3 * PATCH * PATCH]`.
    """
    tile = tl.program_id(0)
    frame = plan + find_frame(plan + FIRST_FINISH_TILE * num_frames, num_frames, tile)
    tile -= number(frame, num_frames, FIRST_FINISH_TILE)
    grid_width = number(frame, num_frames, GRID_WIDTH)
    tiles_a_row = tl.cdiv(grid_width * PATCH, COLUMNS)
    row = (tile // tiles_a_row) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tile % tiles_a_row) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    new_width = number(frame, num_frames, NEW_WIDTH)
    new_height = number(frame, num_frames, NEW_HEIGHT)
    red, green, blue = _down(frame, num_frames, row, column, (row < new_height) & (column < new_width))
    first_patch = tl.load(frame + FIRST_PATCH * num_frames)
    above = ((row // PATCH) * grid_width) * (3 * PATCH * PATCH) + (row % PATCH) * PATCH
    before = (column // PATCH) * (3 * PATCH * PATCH) + column % PATCH
    rows = out + first_patch * (3 * PATCH * PATCH) + (above + before)
    mask = (row < number(frame, num_frames, GRID_HEIGHT) * PATCH) & (column < grid_width * PATCH)
    _store(rows, red, channels, 0, PATCH, mask)
    _store(rows, green, channels, 1, PATCH, mask)
    _store(rows, blue, channels, 2, PATCH, mask)
