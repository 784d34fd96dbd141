"""Grids as users give them, to `stage` and `put`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mmcache
from mmcache.array_checks import checked_grid
from tests.mmcache.support import image

ROWS = np.random.default_rng(5).standard_normal((24, 588)).astype(np.float32)
WRONG: list[Any] = [(1, 4), (1, 4, 6, 1), (1.0, 4, 6), "146", None, 24, (1, 4, None), np.float32([1, 4, 6])]


@pytest.mark.parametrize("grid", [(1, 4, 6), [1, 4, 6], np.array([1, 4, 6]), (np.int64(1), np.int32(4), np.uint8(6))])
def test_any_three_integers_are_a_grid(client: mmcache.Client, grid: Any) -> None:
    assert checked_grid(grid) == (1, 4, 6)
    ref = client.stage(ROWS, grid=grid)
    client.cancel(ref)
    with client.encode([image(802)])[0] as lease:
        key = mmcache.ContentKey(np.random.default_rng().bytes(16))
        assert client.put(key, lease.numpy(), grid)


@pytest.mark.parametrize("grid", WRONG)
def test_what_is_no_grid_is_one_clear_error(client: mmcache.Client, grid: Any) -> None:
    with pytest.raises(ValueError, match="three integers"):
        checked_grid(grid)
    with pytest.raises(mmcache.UnsupportedItem, match="three integers"):
        client.stage_all([ROWS], grids=[grid])
    with client.encode([image(802)])[0] as lease, pytest.raises(mmcache.WrongEmbedding, match="three integers"):
        client.put(lease.key, lease.numpy(), grid)
