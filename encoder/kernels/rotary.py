"""2-D rotary embedding of queries and keys in place, and tanh GELU behind a bias.

Shape suffixes: T rows, H heads, d width of a head, c pairs of one head.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def _rotate_kernel(
    qkv, cosines, sines, rows, stride, width, HEAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pair = (tl.program_id(1) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)) % (HEAD // 2)
    there = (row < rows)[:, None]
    place = row.to(tl.int64)[:, None] * stride + column[None, :]
    mask = there & (column < width)[None, :]
    values = tl.load(qkv + place, mask=mask, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(values, (ROWS, BLOCK // 2, 2)))
    turn = row[:, None] * (HEAD // 2) + pair[None, :]
    cosine = tl.load(cosines + turn, mask=there, other=0.0)
    sine = tl.load(sines + turn, mask=there, other=0.0)
    turned = tl.join(even * cosine - odd * sine, even * sine + odd * cosine)
    tl.store(qkv + place, tl.reshape(turned, (ROWS, BLOCK)).to(qkv.dtype.element_ty), mask=mask)


def rotate_(
    qkv_T3Hd: torch.Tensor,
    cosines_Tc: torch.Tensor,
    sines_Tc: torch.Tensor,
    *,
    rows: int = 8,
    block: int = 256,
    num_warps: int = 4,
) -> None:
    """Turn adjacent pairs of queries and keys, in float32 whatever the dtype; values are not touched."""
    total, _, heads, head = qkv_T3Hd.shape
    width = 2 * heads * head
    _rotate_kernel[(triton.cdiv(total, rows), triton.cdiv(width, block))](
        qkv_T3Hd, cosines_Tc, sines_Tc, total, qkv_T3Hd.stride(0), width,
        HEAD=head, ROWS=rows, BLOCK=block, num_warps=num_warps,
    )  # fmt: skip


@triton.jit
def _gelu_kernel(x, bias, count, width, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    values = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    values += tl.load(bias + place % width, mask=mask, other=0.0).to(tl.float32)
    inner = 0.7978845608028654 * (values + 0.044715 * values * values * values)
    gate = 1.0 / (1.0 + tl.exp(-2.0 * inner))
    tl.store(x + place, (values * gate).to(x.dtype.element_ty), mask=mask)


def bias_gelu_(x_TD: torch.Tensor, bias_D: torch.Tensor) -> torch.Tensor:
    """Replace `x` by the tanh GELU of `x + bias`, in float32 whatever the dtype, and return it."""
    _gelu_kernel[(triton.cdiv(x_TD.numel(), 2048),)](x_TD, bias_D, x_TD.numel(), x_TD.shape[1], BLOCK=2048, num_warps=8)
    return x_TD
