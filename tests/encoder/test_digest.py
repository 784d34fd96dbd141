"""Digests of embeddings: by the formula, the same on a device, and another for every change."""

import pytest
import torch

from encoder.digest import MIX, digests
from tests.conftest import has_cuda

pytest.importorskip("triton")

from encoder.kernels.digest import digests_there
from encoder.kernels.finite import BLOCK

DEVICE = torch.device("cuda", 0) if has_cuda() else torch.device("cpu")


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(4)).bfloat16()


def test_it_is_the_formula() -> None:
    words = [7, 0, 2**32 - 1, 12]
    tensor = torch.tensor(words, dtype=torch.int64).to(torch.uint32)
    expected = sum(word * (2 * place + 1) * MIX for place, word in enumerate(words)) % 2**64
    assert digests([tensor]) == [expected]
    odd = torch.tensor([1, 2, 3, 4, 5], dtype=torch.uint8)
    assert digests([odd]) == [(0x04030201 + 5 * 3) * MIX % 2**64]


def test_a_device_finds_the_same() -> None:
    """Items of less than a program's block, of some and a part, at any word of one memory."""
    memory = draw(4 * BLOCK + 60)
    parts = [memory[2:10], memory[10 : 2 * BLOCK + 24], memory[2 * BLOCK + 24 : 2 * BLOCK + 26]]
    there = memory.to(DEVICE)
    parts_there = [there[2:10], there[10 : 2 * BLOCK + 24], there[2 * BLOCK + 24 : 2 * BLOCK + 26]]
    assert digests_there(parts_there) == digests(parts) == digests(parts_there)


def test_every_change_shows() -> None:
    rows = draw(6, 8)
    (before,) = digests([rows])
    assert digests([rows.clone()]) == [before]
    swapped, flipped, shifted = rows[[1, 0, 2, 3, 4, 5]], rows.clone(), rows.roll(2, 1)
    flipped.view(torch.int16)[5, 7] ^= 1
    assert before not in digests([swapped, flipped, shifted])
    assert digests([torch.zeros(4, 4)]) == [0]
