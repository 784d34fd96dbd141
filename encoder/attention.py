"""Attention inside each item of a packed sequence: one signature, whatever kernel does the work.

Shape suffixes: T patches of all items, H heads, d width of a head.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn


def packed_attention(
    q_THd: torch.Tensor, k_THd: torch.Tensor, v_THd: torch.Tensor, cu_seqlens: Sequence[int]
) -> torch.Tensor:
    """Return softmax(q k' / sqrt(d)) v, full and bidirectional within each item, as a new `[T, H, d]`.

    `cu_seqlens` are host ints from 0 to T, so no device is read. The inputs may be strided views as long as their last
    dimension is dense. Memory is linear in the items' lengths: there is no mask.
    """
    assert cu_seqlens[-1] == q_THd.shape[0], "cu_seqlens ends where the packed sequence ends"
    outs = [_attend(q_THd[a:b], k_THd[a:b], v_THd[a:b]) for a, b in pairwise(cu_seqlens)]
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _attend(q_nHd: torch.Tensor, k_nHd: torch.Tensor, v_nHd: torch.Tensor) -> torch.Tensor:
    q, k, v = (x_nHd.transpose(0, 1).unsqueeze(0) for x_nHd in (q_nHd, k_nHd, v_nHd))
    return nn.functional.scaled_dot_product_attention(q, k, v).squeeze(0).transpose(0, 1)
