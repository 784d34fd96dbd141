"""What the resize kernels share: which frame a program works for, and the horizontal pass on a block of pixels."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from encoder.kernels.resize_plan import line

WIDTH = tl.constexpr(line("width"))
HEIGHT = tl.constexpr(line("height"))
SOURCE = tl.constexpr(line("source"))
NEW_WIDTH = tl.constexpr(line("new_width"))
NEW_HEIGHT = tl.constexpr(line("new_height"))
GRID_WIDTH = tl.constexpr(line("grid_width"))
GRID_HEIGHT = tl.constexpr(line("grid_height"))
ACROSS_TABLE = tl.constexpr(line("across_table"))
ACROSS_TAPS = tl.constexpr(line("across_taps"))
DOWN_TABLE = tl.constexpr(line("down_table"))
DOWN_TAPS = tl.constexpr(line("down_taps"))
SCRATCH = tl.constexpr(line("scratch"))
FIRST_ACROSS_TILE = tl.constexpr(line("first_across_tile"))
FIRST_FINISH_TILE = tl.constexpr(line("first_finish_tile"))
FIRST_PATCH = tl.constexpr(line("first_patch"))

UNIT = tl.constexpr(1 << 22)
"""A weight of one."""


@triton.jit
def find_frame(firsts, num_frames, tile):
    """The last frame whose first tile is not beyond `tile`: one without tiles is never found."""
    passed = 0
    for start in range(0, num_frames, 128):
        index = start + tl.arange(0, 128)
        first = tl.load(firsts + index, mask=index < num_frames, other=1 << 40)
        passed += tl.sum((first <= tile).to(tl.int32))
    return passed - 1


@triton.jit
def number(frame, num_frames, field: tl.constexpr):
    return tl.load(frame + field * num_frames).to(tl.int32)


@triton.jit
def pointer(frame, num_frames, field: tl.constexpr, dtype: tl.constexpr):
    return tl.load(frame + field * num_frames).to(tl.pointer_type(dtype))


@triton.jit
def level(total):
    """A sum of pixels times weights as a level of 0..255."""
    return tl.minimum(tl.maximum((total + (1 << 21)) >> 22, 0), 255)


@triton.jit
def byte(word, index: tl.constexpr):
    return ((word >> (8 * index)) & 255).to(tl.int32)


@triton.jit
def word_at(words, index, num_words, inside):
    return tl.load(words + index, mask=inside & (index < num_words), other=0)


@triton.jit
def joined(low, high, odd_bits):
    """The 32 bits that begin `odd_bits` (0 to 31) into the first of two words."""
    return (low >> odd_bits) | ((high << 1) << (odd_bits ^ 31))


@triton.jit
def source_words(frame, num_frames):
    """A frame's pixels as aligned words: pointer, bytes before the first pixel, and how many words there are.

    The first and the last word may hold bytes of a neighbour, which meet weights of zero alone.
    """
    address = tl.load(frame + SOURCE * num_frames)
    odd = (address & 3).to(tl.int32)
    num_bytes = 3 * number(frame, num_frames, WIDTH) * number(frame, num_frames, HEIGHT)
    return (address - odd).to(tl.pointer_type(tl.uint32)), odd, (num_bytes + odd + 3) >> 2


@triton.jit
def across(words, num_words, at, weights, new_width, taps, inside):
    """The horizontal pass: levels of three channels, of windows that begin `at` bytes from `words`.

    `weights` points to each column's weight of the first tap. Four taps are twelve bytes: three words and, since
    they begin anywhere, a fourth, which is the next four taps' first.
    """
    odd_bits = ((at & 3) * 8).to(tl.uint32)
    index = at >> 2
    red = at * 0
    green = at * 0
    blue = at * 0
    carried = word_at(words, index, num_words, inside)
    for _ in range(0, taps, 4):
        second = word_at(words, index + 1, num_words, inside)
        third = word_at(words, index + 2, num_words, inside)
        fourth = word_at(words, index + 3, num_words, inside)
        first = joined(carried, second, odd_bits)
        middle = joined(second, third, odd_bits)
        last = joined(third, fourth, odd_bits)
        carried = fourth
        w0 = tl.load(weights)
        w1 = tl.load(weights + new_width)
        w2 = tl.load(weights + 2 * new_width)
        w3 = tl.load(weights + 3 * new_width)
        red += byte(first, 0) * w0 + byte(first, 3) * w1 + byte(middle, 2) * w2 + byte(last, 1) * w3
        green += byte(first, 1) * w0 + byte(middle, 0) * w1 + byte(middle, 3) * w2 + byte(last, 2) * w3
        blue += byte(first, 2) * w0 + byte(middle, 1) * w1 + byte(last, 0) * w2 + byte(last, 3) * w3
        index += 3
        weights += 4 * new_width
    return level(red), level(green), level(blue)
