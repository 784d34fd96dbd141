"""Attention inside each span of a packed sequence, for heads whose width is no power of two.

Other kernels pad a head of 72 to 96 or 128. Here a head is a wide part and a narrow one, 64 and 16, each with products
of its own: 80 columns are computed for 72. Keys and values beyond a span are never loaded, so that what lies there,
were it NaN, cannot pass.

Shape suffixes: T patches of all spans, H heads, d width of a head.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from encoder.spans import TILE_ROWS, Spans

LOG2_E: Final = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class FlashTuning:
    """Keys of one step, warps of one program, and steps whose loads are under way at once."""

    keys: int = 64
    num_warps: int = 8
    num_stages: int = 3


@triton.jit
def _load(place, mask, MASKED: tl.constexpr):
    return tl.load(place, mask=mask, other=0.0) if MASKED else tl.load(place)


@triton.jit
def _step(
    q, q_tail, k, v, first, end, stride, row_max, row_sum, out, out_tail, scale,
    HEAD: tl.constexpr, WIDE: tl.constexpr, TAIL: tl.constexpr, KEYS: tl.constexpr, PARTIAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of keys: only a partial one, the last of a span, has keys to leave out."""
    key = first + tl.arange(0, KEYS)
    tail = WIDE + tl.arange(0, out_tail.shape[1])
    inside = (key < end)[:, None]
    tail_inside = inside & (tail < HEAD)[None, :] if PARTIAL else (tail < HEAD)[None, :]
    rows = key.to(tl.int64)[:, None] * stride
    place = rows + tl.arange(0, WIDE)[None, :]
    tail_place = rows + tail[None, :]
    scores = tl.dot(q, tl.trans(_load(k + place, inside, PARTIAL)), input_precision=PRECISION)
    if TAIL > 0:
        k_tail = tl.load(k + tail_place, mask=tail_inside, other=0.0)
        scores = tl.dot(q_tail, tl.trans(k_tail), scores, input_precision=PRECISION)
    if PARTIAL:
        scores = tl.where((key < end)[None, :], scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_max[:, None])
    shrink = tl.exp2(row_max - new_max)
    row_sum = row_sum * shrink + tl.sum(weights, 1)
    weights = weights.to(v.dtype.element_ty)
    out = tl.dot(weights, _load(v + place, inside, PARTIAL), out * shrink[:, None], input_precision=PRECISION)
    if TAIL > 0:
        v_tail = tl.load(v + tail_place, mask=tail_inside, other=0.0)
        out_tail = tl.dot(weights, v_tail, out_tail * shrink[:, None], input_precision=PRECISION)
    return new_max, row_sum, out, out_tail


@triton.jit
def _flash_kernel(
    q, k, v, out, cu_seqlens, tiles, stride, out_stride, scale,
    HEAD: tl.constexpr, WIDE: tl.constexpr, TAIL: tl.constexpr, TAIL_BLOCK: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    head = tl.program_id(1)
    span = tl.load(tiles + 2 * tile)
    if span < 0:
        return
    start = tl.load(cu_seqlens + span)
    end = tl.load(cu_seqlens + span + 1)
    query = tl.load(tiles + 2 * tile + 1) + tl.arange(0, QUERIES)
    q += head * HEAD
    k += head * HEAD
    v += head * HEAD
    column = tl.arange(0, WIDE)
    tail = WIDE + tl.arange(0, TAIL_BLOCK)
    there = (query < end)[:, None]
    rows = query.to(tl.int64)[:, None] * stride
    q_block = tl.load(q + rows + column[None, :], mask=there, other=0.0)
    q_tail = tl.load(q + rows + tail[None, :], mask=there & (tail < HEAD)[None, :], other=0.0)
    row_max = tl.full([QUERIES], float("-inf"), tl.float32)
    row_sum = tl.zeros([QUERIES], tl.float32)
    total = tl.zeros([QUERIES, WIDE], tl.float32)
    total_tail = tl.zeros([QUERIES, TAIL_BLOCK], tl.float32)
    whole_end = start + (end - start) // KEYS * KEYS
    for first in tl.range(start, whole_end, KEYS, num_stages=STAGES):
        row_max, row_sum, total, total_tail = _step(
            q_block, q_tail, k, v, first, end, stride, row_max, row_sum, total, total_tail, scale,
            HEAD, WIDE, TAIL, KEYS, False, PRECISION,
        )  # fmt: skip
    if whole_end < end:
        row_max, row_sum, total, total_tail = _step(
            q_block, q_tail, k, v, whole_end, end, stride, row_max, row_sum, total, total_tail, scale,
            HEAD, WIDE, TAIL, KEYS, True, PRECISION,
        )  # fmt: skip
    share = 1.0 / row_sum
    rows = query.to(tl.int64)[:, None] * out_stride + head * HEAD
    tl.store(out + rows + column[None, :], (total * share[:, None]).to(out.dtype.element_ty), mask=there)
    if TAIL > 0:
        total_tail = (total_tail * share[:, None]).to(out.dtype.element_ty)
        tl.store(out + rows + tail[None, :], total_tail, mask=there & (tail < HEAD)[None, :])


def flash_attention(
    q_THd: torch.Tensor,
    k_THd: torch.Tensor,
    v_THd: torch.Tensor,
    spans: Spans,
    tuning: FlashTuning = FlashTuning(),
) -> torch.Tensor:
    """Return softmax(q k' / sqrt(d)) v within each span, `[T, H, d]`; heads lie side by side in the inputs."""
    total, heads, head = q_THd.shape
    assert q_THd.stride() == k_THd.stride() == v_THd.stride(), "the three are parts of one tensor"
    assert q_THd.stride()[1:] == (head, 1), "heads lie side by side"
    wide = 1 << (head.bit_length() - 1)
    tail = triton.next_power_of_2(head - wide) if head > wide else 0
    out = torch.empty(total, heads, head, dtype=q_THd.dtype, device=q_THd.device)
    _flash_kernel[(spans.tiles.shape[0], heads)](
        q_THd, k_THd, v_THd, out, spans.table, spans.tiles, q_THd.stride(0), out.stride(0), LOG2_E / head**0.5,
        HEAD=head, WIDE=wide, TAIL=max(16, tail) if tail else 0, TAIL_BLOCK=max(16, tail), QUERIES=TILE_ROWS,
        KEYS=tuning.keys, STAGES=tuning.num_stages,
        PRECISION="ieee" if q_THd.dtype == torch.float32 else "tf32", num_warps=tuning.num_warps,
    )  # fmt: skip
    return out
