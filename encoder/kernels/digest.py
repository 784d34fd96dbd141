"""`encoder.digest` on a device: all tensors of a batch in one launch."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from encoder.digest import MIX
from encoder.kernels.finite import BLOCK, program_table
from encoder.kernels.resize_parts import find_frame

SIGNED_MIX = tl.constexpr(MIX - (1 << 64))


@triton.jit(do_not_specialize=["num"])
def _digest_kernel(table, num, found, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    item = find_frame(table + 2 * num, num, program)
    words = tl.load(table + item).to(tl.pointer_type(tl.uint32))
    index = (program - tl.load(table + 2 * num + item)) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + index, mask=index < tl.load(table + num + item), other=0).to(tl.int64)
    tl.atomic_add(found + item, tl.sum(word * ((2 * index + 1) * SIGNED_MIX), 0))


def digests_there(tensors: Sequence[torch.Tensor]) -> list[int]:
    """As `encoder.digest.digests`; a sum of integers is the same in any order."""
    table, num_programs = program_table(tensors)
    found = torch.zeros(len(tensors), dtype=torch.int64, device=table.device)
    _digest_kernel[(num_programs,)](table, len(tensors), found, BLOCK=BLOCK, num_warps=8)
    return [total % 2**64 for total in found.tolist()]
