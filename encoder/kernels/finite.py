"""Whether embeddings that lie anywhere on a device are finite, all of a batch in one launch and one read."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl

from encoder.kernels.resize_parts import find_frame

BLOCK: Final = 8192
"""Words of 32 bits of one program."""
EXPONENTS: Final = MappingProxyType({torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000})
"""Bits that are all set in infinities and NaN alone."""


@triton.jit(do_not_specialize=["num"])
def _finite_kernel(table, num, found, EXPONENT: tl.constexpr, BLOCK: tl.constexpr):
    """`table` is int64 `[3, num]`: address, words, first program of each; `found` counts words that are not finite."""
    program = tl.program_id(0)
    item = find_frame(table + 2 * num, num, program)
    words = tl.load(table + item).to(tl.pointer_type(tl.int32))
    index = (program - tl.load(table + 2 * num + item)) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + index, mask=index < tl.load(table + num + item), other=0)
    bad = ((word & EXPONENT) == EXPONENT).to(tl.int32)
    if EXPONENT < 65536:
        bad |= (((word >> 16) & EXPONENT) == EXPONENT).to(tl.int32)
    num_bad = tl.sum(bad, 0)
    if num_bad > 0:
        tl.atomic_add(found + item, num_bad)


def program_table(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Return on their device, int64 `[3, num]`, the address of each, its words, and its first program; and how many
    programs of `BLOCK` words there are."""
    device = tensors[0].device
    sizes = np.array([tensor.nbytes // 4 for tensor in tensors], np.int64)
    programs = -(-sizes // BLOCK)
    firsts = np.cumsum(programs) - programs
    table = torch.from_numpy(np.stack([np.array([one.data_ptr() for one in tensors], np.int64), sizes, firsts]))
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    return table, int(programs.sum())


def can_be_read(outs: Sequence[torch.Tensor]) -> bool:
    """Whether each is a whole number of aligned words."""
    return all(out.data_ptr() % 4 == 0 and out.nbytes % 4 == 0 and out.nbytes > 0 for out in outs)


def are_finite(outs: Sequence[torch.Tensor]) -> list[bool]:
    """Return for each contiguous tensor of one device and dtype whether it holds neither NaN nor infinity.

    They satisfy `can_be_read`. Waits for the device.
    """
    table, num_programs = program_table(outs)
    found = torch.zeros(len(outs), dtype=torch.int32, device=table.device)
    _finite_kernel[(num_programs,)](
        table, len(outs), found, EXPONENT=EXPONENTS[outs[0].dtype], BLOCK=BLOCK, num_warps=8
    )
    return [count == 0 for count in found.tolist()]
