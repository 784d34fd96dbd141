"""Zero mismatches and no lost lease on a device, while consumers are killed. Longer with MMCACHE_SOAK."""

from __future__ import annotations

import os

import pytest

from tests.ipc.cuda_torture import torture

pytest.importorskip("cuda.bindings", reason="needs cuda-bindings", exc_type=ImportError)
pytestmark = pytest.mark.gpu


def test_no_lease_is_lost_and_no_byte_is_wrong() -> None:
    result = torture(seconds=120.0 if os.environ.get("MMCACHE_SOAK") else 10.0, num_consumers=4)
    print(result)
    assert result.num_mismatches == 0
    assert result.num_strays == 0
    assert result.num_granted == result.num_acknowledged + result.num_died
    assert result.num_kills >= 2
    assert result.num_evictions > 1000
    assert result.num_compared > 2000
