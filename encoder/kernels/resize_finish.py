"""Last launch, often the only one: the vertical pass, then padding, normalising and cutting into patch rows."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

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
def _from_scratch(frame, num_frames, row, column, inside):
    """Levels of three channels in source rows and output columns, as the first launch made them."""
    scratch = pointer(frame, num_frames, SCRATCH, tl.int32)
    word = tl.load(scratch + row * number(frame, num_frames, NEW_WIDTH) + column, mask=inside, other=0)
    return word & 255, (word >> 8) & 255, word >> 16


@triton.jit
def _from_source(frame, num_frames, row, column, inside):
    """The same of a frame whose width stays."""
    width = number(frame, num_frames, WIDTH)
    pixel = pointer(frame, num_frames, SOURCE, tl.uint8) + 3 * (row * width + column)
    red = tl.load(pixel, mask=inside, other=0).to(tl.int32)
    green = tl.load(pixel + 1, mask=inside, other=0).to(tl.int32)
    blue = tl.load(pixel + 2, mask=inside, other=0).to(tl.int32)
    return red, green, blue


@triton.jit
def _made_now(frame, num_frames, row, column, inside):
    """The same by a horizontal pass for these pixels alone."""
    width = number(frame, num_frames, WIDTH)
    new_width = number(frame, num_frames, NEW_WIDTH)
    table = pointer(frame, num_frames, ACROSS_TABLE, tl.int32) + tl.minimum(column, new_width - 1)
    words, odd, num_words = source_words(frame, num_frames)
    at = odd + 3 * (row * width + tl.load(table))
    taps = number(frame, num_frames, ACROSS_TAPS)
    return across(words, num_words, at, table + new_width, new_width, taps, inside)


@triton.jit
def _pixels(frame, num_frames, row, column, inside, FUSED: tl.constexpr):
    has_scratch = tl.load(frame + SCRATCH * num_frames) != 0
    if FUSED:
        if has_scratch:
            red, green, blue = _from_scratch(frame, num_frames, row, column, inside)
        elif number(frame, num_frames, ACROSS_TAPS) != 0:
            red, green, blue = _made_now(frame, num_frames, row, column, inside)
        else:
            red, green, blue = _from_source(frame, num_frames, row, column, inside)
    elif has_scratch:
        red, green, blue = _from_scratch(frame, num_frames, row, column, inside)
    else:
        red, green, blue = _from_source(frame, num_frames, row, column, inside)
    return red, green, blue


@triton.jit
def _down(frame, num_frames, row, column, inside, FUSED: tl.constexpr):
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
        r, g, b = _pixels(frame, num_frames, tl.minimum(first + tap, height - 1), column, inside, FUSED)
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
    plan,
    num_frames,
    channels,
    out,
    PATCH: tl.constexpr,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FUSED: tl.constexpr,
):
    """One program a tile of `ROWS` by `COLUMNS` pixels of a padded frame.

    `channels` is float32 `[6]`: means, then deviations, of levels. `out` is `[num_patches, 3 * PATCH * PATCH]`, its
    rows `STRIDE` values apart.
    `FUSED` if there are frames whose width changes and that have no scratch.
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
    inside = (row < new_height) & (column < new_width)
    red, green, blue = _down(frame, num_frames, row, column, inside, FUSED)
    first_patch = tl.load(frame + FIRST_PATCH * num_frames)
    above = ((row // PATCH) * grid_width) * STRIDE + (row % PATCH) * PATCH
    before = (column // PATCH) * STRIDE + column % PATCH
    rows = out + first_patch * STRIDE + (above + before)
    mask = (row < number(frame, num_frames, GRID_HEIGHT) * PATCH) & (column < grid_width * PATCH)
    _store(rows, red, channels, 0, PATCH, mask)
    _store(rows, green, channels, 1, PATCH, mask)
    _store(rows, blue, channels, 2, PATCH, mask)
