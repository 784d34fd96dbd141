"""A digest of an embedding where it lies, so that it can be told later, without a copy, whether a bit has changed."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Final

import numpy as np
import torch

MIX: Final = 0x9E3779B97F4A7C15
"""Odd, so that what a word adds tells the word; 2^64 divided by the golden ratio."""
WORDS_AT_ONCE: Final = 1 << 20


def digests(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return 64 bits for each contiguous tensor: the sum modulo 2^64 of its words of 32 bits, each times an odd number
    of its own.

    Any change of a single word changes them; others are missed once in some 2^64 times, if nobody seeks them. Tensors
    on a device are read there, in one launch, and the call waits for it; they are whole words and aligned to them.
    """
    if tensors and tensors[0].is_cuda and find_spec("triton") is not None:
        from encoder.kernels.digest import digests_there

        return digests_there(tensors)
    return [_digest(tensor.cpu()) for tensor in tensors]


def _digest(tensor: torch.Tensor) -> int:
    raw = tensor.view(torch.uint8).numpy().reshape(-1)
    words = np.zeros(-(-raw.size // 4), np.uint32)
    words.view(np.uint8)[: raw.size] = raw
    total = 0
    for start in range(0, words.size, WORDS_AT_ONCE):
        part = words[start : start + WORDS_AT_ONCE].astype(np.uint64)
        odd = (2 * np.arange(start, start + part.size, dtype=np.uint64) + 1) * np.uint64(MIX)
        total += int((part * odd).sum(dtype=np.uint64))
    return total % 2**64
