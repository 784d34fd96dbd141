"""Kernels that take a packed batch row by row: where a row lies, its position, LayerNorm, and the merge at the end.

Shape suffixes: T rows, D hidden width, c pairs of one head.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from typing import Final

import torch
import triton
import triton.language as tl

from encoder.spans import Spans

FEWEST_SLOTS: Final = 128


@triton.jit
def _cubic(distance):
    near = (1.25 * distance - 2.25) * distance * distance + 1.0
    far = -0.75 * (((distance - 5.0) * distance + 8.0) * distance - 4.0)
    return tl.where(distance <= 1.0, near, tl.where(distance < 2.0, far, 0.0))


@triton.jit
def _span_of(starts, row, stride, SLOTS: tl.constexpr):
    """Index of the span that holds a row: how many spans end at or before it."""
    slot = tl.arange(0, SLOTS)
    ends = tl.load(starts + 1 + slot, mask=slot < stride - 1, other=2147483647)
    return tl.sum((ends <= row).to(tl.int32), 0)


@triton.jit(do_not_specialize=["stride"])
def _place_kernel(
    table, stride, positions, times, frequencies, out, cosines, sines, width,
    SIDE_Y: tl.constexpr, SIDE_X: tl.constexpr, PAIRS: tl.constexpr, PAIRS_BLOCK: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row's resampled position, and the turns of its pairs: even pairs by x, odd pairs by y."""
    row = tl.program_id(0)
    span = _span_of(table, row, stride, SLOTS)
    frames = tl.load(table + 2 * stride + span)
    height = tl.load(table + 3 * stride + span)
    columns = tl.load(table + 4 * stride + span)
    local = row - tl.load(table + span)
    frame = local // (height * columns)
    y = local % (height * columns) // columns
    x = local % columns

    pair = tl.arange(0, PAIRS_BLOCK)
    frequency = tl.load(frequencies + pair // 2, mask=pair < PAIRS, other=0.0)
    angle = tl.where(pair % 2 == 0, x, y).to(tl.float32) * frequency
    tl.store(cosines + row * PAIRS + pair, tl.cos(angle), mask=pair < PAIRS)
    tl.store(sines + row * PAIRS + pair, tl.sin(angle), mask=pair < PAIRS)

    column = tl.arange(0, BLOCK)
    inside = column < width
    source_y = (y.to(tl.float32) + 0.5) * SIDE_Y / height.to(tl.float32) - 0.5
    source_x = (x.to(tl.float32) + 0.5) * SIDE_X / columns.to(tl.float32) - 0.5
    first_y = tl.floor(source_y)
    first_x = tl.floor(source_x)
    total = tl.zeros([BLOCK], tl.float32)
    for tap_y in range(-1, 3):
        weight_y = _cubic(tl.abs(source_y - first_y - tap_y))
        at_y = tl.minimum(tl.maximum(first_y.to(tl.int32) + tap_y, 0), SIDE_Y - 1)
        for tap_x in range(-1, 3):
            weight = weight_y * _cubic(tl.abs(source_x - first_x - tap_x))
            at_x = tl.minimum(tl.maximum(first_x.to(tl.int32) + tap_x, 0), SIDE_X - 1)
            total += weight * tl.load(positions + (at_y * SIDE_X + at_x) * width + column, mask=inside, other=0.0)
    if frames > 1:
        total += tl.load(times + frame * width + column, mask=inside, other=0.0)
    tl.store(out + row.to(tl.int64) * width + column, total.to(out.dtype.element_ty), mask=inside)


def _slots(stride: int) -> int:
    """Few distinct sizes: each is compiled by itself."""
    slots: int = max(FEWEST_SLOTS, triton.next_power_of_2(stride))
    return slots


def place(
    spans: Spans, positions: torch.Tensor, times: torch.Tensor, frequencies: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what depends on a patch's place: its position `[T, D]` in the table's dtype, cosines and sines `[T, c]`.

    `positions` is the learned table `[height, width, D]`, `times` `[frames, D]` in float32 is added for items of more
    than one frame, `frequencies` has one for two neighbouring pairs.
    """
    side_y, side_x, width = positions.shape
    pairs = 2 * frequencies.numel()
    rows = spans.num_patches
    out = positions.new_empty(rows, width)
    cosines, sines = torch.empty(2, rows, pairs, dtype=torch.float32, device=out.device)
    stride = spans.table.shape[1]
    _place_kernel[(rows,)](
        spans.table, stride, positions, times, frequencies, out, cosines, sines, width,
        SIDE_Y=side_y, SIDE_X=side_x, PAIRS=pairs, PAIRS_BLOCK=triton.next_power_of_2(pairs),
        SLOTS=_slots(stride), BLOCK=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return out, cosines, sines


@triton.jit
def _normalised(x, inside, column, weight, bias, width, eps):
    mean = tl.sum(x, 1) / width
    centred = tl.where(inside[None, :], x - mean[:, None], 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / width + eps)
    weight = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    return centred * scale[:, None] * weight[None, :] + bias[None, :]


@triton.jit(do_not_specialize=["rows"])
def _layer_norm_kernel(
    x, offset, weight, bias, out, rows, width, eps, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = column < width
    mask = (row < rows)[:, None] & inside[None, :]
    place = row.to(tl.int64)[:, None] * width + column[None, :]
    values = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    values += tl.load(offset + column, mask=inside, other=0.0)[None, :]
    result = _normalised(values, inside, column, weight, bias, width, eps)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)


def layer_norm(
    x_TD: torch.Tensor,
    offset_D: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor,
    eps: float,
    *,
    rows: int = 1,
    num_warps: int = 4,
) -> torch.Tensor:
    """Return the LayerNorm of `x + offset`, summed in float32 and rounded once; the offset is float32."""
    out = torch.empty_like(x_TD)
    total, width = x_TD.shape
    _layer_norm_kernel[(triton.cdiv(total, rows),)](
        x_TD, offset_D, weight_D, bias_D, out, total, width, eps,
        BLOCK=triton.next_power_of_2(width), ROWS=rows, num_warps=num_warps,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["stride"])
def _merge_kernel(
    table, stride, x, offset, weight, bias, eps, next_weight, next_bias, next_eps, out, width,
    MERGE: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    span = _span_of(table + stride, row, stride, SLOTS)
    is_item = span < stride - 1
    frames = tl.load(table + 2 * stride + span, mask=is_item, other=0)
    height = tl.load(table + 3 * stride + span, mask=is_item, other=MERGE)
    columns = tl.load(table + 4 * stride + span, mask=is_item, other=MERGE)
    local = row - tl.load(table + stride + span)
    token = local // (MERGE * MERGE)
    part = local % (MERGE * MERGE)
    y = token // (columns // MERGE) * MERGE + part // MERGE
    x_place = token % (columns // MERGE) * MERGE + part % MERGE
    plane = height * columns
    start = tl.load(table + span) + y * columns + x_place
    shift = tl.load(offset + column, mask=inside, other=0.0)
    total = tl.zeros([1, BLOCK], tl.float32)
    for frame in range(frames):
        place = (start + frame * plane).to(tl.int64) * width + column
        values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) + shift
        values = _normalised(values[None, :], inside, column, weight, bias, width, eps)
        total += values.to(out.dtype.element_ty).to(tl.float32)
    total = (total / tl.maximum(frames, 1)).to(out.dtype.element_ty).to(tl.float32)
    total = _normalised(total, inside, column, next_weight, next_bias, width, next_eps)
    total = tl.where(frames > 0, total, 0.0)
    tl.store(out + row.to(tl.int64) * width + column[None, :], total.to(out.dtype.element_ty), mask=inside[None, :])


def merge(
    x_TD: torch.Tensor,
    spans: Spans,
    offset_D: torch.Tensor,
    norm: torch.nn.LayerNorm,
    next_norm: torch.nn.LayerNorm,
    merge_size: int,
) -> torch.Tensor:
    """Return `[N, merge^2 * D]`, N tokens with the padding, whose rows are zero and behind those of all items.

    LayerNorm, mean over frames, merged patches side by side, LayerNorm.
    """
    width = x_TD.shape[1]
    total = spans.num_tokens * merge_size**2
    out = x_TD.new_empty(total, width)
    stride = spans.table.shape[1]
    _merge_kernel[(total,)](
        spans.table, stride, x_TD, offset_D, norm.weight, norm.bias, norm.eps,
        next_norm.weight, next_norm.bias, next_norm.eps, out, width,
        MERGE=merge_size, SLOTS=_slots(stride), BLOCK=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return out.view(spans.num_tokens, -1)
