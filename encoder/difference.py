"""How far one embedding is from another of the same item."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

ROWS_AT_ONCE: Final = 256
"""Compared in float64 this many tokens at a time: bounds the memory that a comparison of large items takes."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Of an embedding from the truth; NaN or infinite numbers if either holds such values.

    `is_same_bits`: every byte is equal. `relative_error`: norm of the difference over that of the truth. `min_cosine`:
    the least cosine between two rows of a token; equal rows have 1.
    """

    is_same_bits: bool
    relative_error: float
    min_cosine: float


def difference(ours: torch.Tensor, truth: torch.Tensor) -> Difference:
    """Compare two contiguous `[num_tokens, width]` of one dtype and device; both are only read."""
    assert ours.shape == truth.shape, f"{tuple(ours.shape)} and {tuple(truth.shape)} are not embeddings of one item"
    if torch.equal(ours.view(torch.uint8), truth.view(torch.uint8)):
        return Difference(True, 0.0, 1.0)
    squared = torch.zeros(2, dtype=torch.float64, device=ours.device)
    cosines = []
    for start in range(0, len(truth), ROWS_AT_ONCE):
        a, b = (rows[start : start + ROWS_AT_ONCE].double() for rows in (ours, truth))
        squared += torch.stack(((a - b).square().sum(), b.square().sum()))
        cosines.append(_cosine(a, b).amin())  # NaN wins
    error, scale = squared.sqrt().tolist()
    relative = error / scale if scale else (float("inf") if error else 0.0)
    return Difference(False, relative, float(torch.stack(cosines).amin()))


def _cosine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where((a == b).all(dim=1), 1.0, nn.functional.cosine_similarity(a, b, dim=1))
