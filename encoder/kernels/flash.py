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

from encoder.errors import EncoderError
from encoder.spans import TILE_ROWS, Spans

MIN_HEAD: Final = 16
MAX_HEAD: Final = 128
LOG2_E: Final = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class FlashTuning:
    """Keys of one step, warps of one program, and steps whose loads are under way at once."""

    keys: int = 128
    num_warps: int = 8
    num_stages: int = 3


HALF_TUNING: Final = FlashTuning()
"""The fastest of six on an H200 at every shape, by up to 7 %."""
FULL_TUNING: Final = FlashTuning(keys=64)
"""For float32: twice the bytes have to fit into shared memory."""


@triton.jit
def _flash_kernel(
    q, k, v, out, cu_seqlens, tiles, stride, out_stride, scale,
    HEAD: tl.constexpr, WIDE: tl.constexpr, TAIL: tl.constexpr, TAIL_BLOCK: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Queries of one tile and head against all keys of their span.

    The loop has the only copy of a step: of two copies, ptxas 12.8 (Triton 3.6) gives the second's narrow product the
    shared memory of another address, an illegal access on Hopper. So the last block of keys is like the others, its
    spare keys being the span's last one again, with a weight of zero.
    """
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
    in_tail = (tail < HEAD)[None, :]
    there = (query < end)[:, None]
    rows = query.to(tl.int64)[:, None] * stride
    q_block = tl.load(q + rows + column[None, :], mask=there, other=0.0)
    q_tail = tl.load(q + rows + tail[None, :], mask=there & in_tail, other=0.0)
    row_max = tl.full([QUERIES], float("-inf"), tl.float32)
    row_sum = tl.zeros([QUERIES], tl.float32)
    total = tl.zeros([QUERIES, WIDE], tl.float32)
    total_tail = tl.zeros([QUERIES, TAIL_BLOCK], tl.float32)
    for first in tl.range(start, end, KEYS, num_stages=STAGES):
        key = first + tl.arange(0, KEYS)
        key_rows = tl.minimum(key, end - 1).to(tl.int64)[:, None] * stride
        place = key_rows + column[None, :]
        tail_place = key_rows + tail[None, :]
        scores = tl.dot(q_block, tl.trans(tl.load(k + place)), input_precision=PRECISION)
        if TAIL > 0:
            k_tail = tl.load(k + tail_place, mask=in_tail, other=0.0)
            scores = tl.dot(q_tail, tl.trans(k_tail), scores, input_precision=PRECISION)
        if first + KEYS > end:
            scores = tl.where((key < end)[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        weights = weights.to(v.dtype.element_ty)
        total = tl.dot(weights, tl.load(v + place), total * shrink[:, None], input_precision=PRECISION)
        if TAIL > 0:
            v_tail = tl.load(v + tail_place, mask=in_tail, other=0.0)
            total_tail = tl.dot(weights, v_tail, total_tail * shrink[:, None], input_precision=PRECISION)
        row_max = new_max
    share = 1.0 / row_sum
    rows = query.to(tl.int64)[:, None] * out_stride + head * HEAD
    tl.store(out + rows + column[None, :], (total * share[:, None]).to(out.dtype.element_ty), mask=there)
    if TAIL > 0:
        total_tail = (total_tail * share[:, None]).to(out.dtype.element_ty)
        tl.store(out + rows + tail[None, :], total_tail, mask=there & in_tail)


def flash_attention(
    q_THd: torch.Tensor,
    k_THd: torch.Tensor,
    v_THd: torch.Tensor,
    spans: Spans,
    tuning: FlashTuning | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return softmax(q k' / sqrt(d)) v within each span, `[T, H, d]`; heads lie side by side in the inputs.

    Given a contiguous `out` of that shape, it is written and returned. Raises `EncoderError` if heads are too narrow
    or too wide.
    """
    total, heads, head = q_THd.shape
    assert q_THd.stride() == k_THd.stride() == v_THd.stride(), "the three are parts of one tensor"
    assert q_THd.stride()[1:] == (head, 1), "heads lie side by side"
    if not MIN_HEAD <= head <= MAX_HEAD:
        raise EncoderError(f"attention triton: heads of {MIN_HEAD} to {MAX_HEAD}, got {head}")
    wide = 1 << (head.bit_length() - 1)
    tail = triton.next_power_of_2(head - wide) if head > wide else 0
    tuning = tuning or (FULL_TUNING if q_THd.dtype == torch.float32 else HALF_TUNING)
    if out is None:
        out = torch.empty(total, heads, head, dtype=q_THd.dtype, device=q_THd.device)
    _flash_kernel[(spans.tiles.shape[0], heads)](
        q_THd, k_THd, v_THd, out, spans.table, spans.tiles, q_THd.stride(0), out.stride(0), LOG2_E / head**0.5,
        HEAD=head, WIDE=wide, TAIL=max(16, tail) if tail else 0, TAIL_BLOCK=max(16, tail), QUERIES=TILE_ROWS,
        KEYS=tuning.keys, STAGES=tuning.num_stages,
        PRECISION="ieee" if q_THd.dtype == torch.float32 else "tf32", num_warps=tuning.num_warps,
    )  # fmt: skip
    return out
