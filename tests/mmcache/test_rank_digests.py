"""A bit that changed in an embedding since it was made is found, and nothing else is blamed."""

from __future__ import annotations

import torch

from mmcache.server.rank_digests import KeptDigests


def test_a_changed_bit_is_found() -> None:
    kept = KeptDigests(is_on=True)
    first, second = torch.randn(4, 16).bfloat16(), torch.randn(2, 16).bfloat16()
    kept.encoded([0, 256], [first, second])
    assert kept.is_intact(0, first)
    assert kept.is_intact(256, second)
    first.view(torch.int16)[3, 15] ^= 1
    assert not kept.is_intact(0, first)
    assert kept.is_intact(256, second)


def test_what_was_copied_or_never_made_here_is_not_blamed() -> None:
    kept = KeptDigests(is_on=True)
    rows = torch.randn(4, 16)
    kept.encoded([0], [rows])
    kept.copied(0)
    kept.copied(512)
    assert kept.is_intact(0, rows + 1)
    assert kept.is_intact(512, rows)


def test_an_extent_that_is_written_again_counts_as_it_is_now() -> None:
    kept = KeptDigests(is_on=True)
    kept.encoded([0], [torch.zeros(4, 16)])
    kept.encoded([0], [torch.ones(4, 16)])
    assert kept.is_intact(0, torch.ones(4, 16))
    assert not kept.is_intact(0, torch.zeros(4, 16))


def test_nothing_is_kept_where_nothing_is_checked() -> None:
    kept = KeptDigests(is_on=False)
    kept.encoded([0], [torch.zeros(4, 16)])
    assert kept.is_intact(0, torch.ones(4, 16))
