"""Leases of a client: release, hold, drop and close, against a real sidecar process."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mmcache
from tests.mmcache.support import SidecarProcess, eventually, image


def test_releasing(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as client:
        (lease,) = client.encode([image(1)])
        assert client.stats()["leases"]["active"] == 1
        lease.release()
        lease.release()
        assert client.stats()["leases"]["active"] == 0
        with pytest.raises(mmcache.LeaseReleased):
            _ = lease.tensor
        with pytest.raises(mmcache.LeaseReleased):
            lease.numpy()
        with pytest.raises(mmcache.LeaseReleased):
            lease.hold()


def test_dropped_lease_warns_and_outlives_in_its_tensor(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as client:
        (lease,) = client.encode([image(1)])
        part = lease.tensor[1:, :5]
        with pytest.warns(ResourceWarning, match="dropped unreleased"):
            del lease
        assert client.stats()["leases"]["active"] == 1, "a tensor from it is alive"
        del part
        gc.collect()
        assert client.stats()["leases"]["active"] == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_dropped_lease_acknowledges_where_warnings_are_errors(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as client, warnings.catch_warnings():
        warnings.simplefilter("error")
        (lease,) = client.encode([image(1)])
        del lease
        gc.collect()
        assert client.stats()["leases"]["active"] == 0


def test_hold_acknowledges_when_the_storage_dies(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as client:
        (lease,) = client.encode([image(1)])
        expected = lease.numpy().copy()
        held = lease.hold()
        lease.release()
        row = held[2]
        del lease, held
        gc.collect()
        assert client.stats()["leases"]["active"] == 1
        np.testing.assert_array_equal(row.numpy(), expected[2])
        del row
        gc.collect()
        assert client.stats()["leases"]["active"] == 0


def test_hold_acknowledges_while_its_lease_is_still_around(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as client:
        (lease,) = client.encode([image(1)])
        early = lease.numpy()
        held = [lease.hold(), lease.hold()]
        assert torch.equal(held[0], lease.tensor)
        del held, early
        gc.collect()
        assert client.stats()["leases"]["active"] == 0
        with pytest.raises(mmcache.LeaseReleased):
            _ = lease.tensor
        lease.release()


def test_pools_are_unmapped_after_the_last_lease(tmp_path: Path) -> None:
    def is_mapped() -> bool:
        return "mmcache-pool" in Path("/proc/self/maps").read_text()

    sidecar = SidecarProcess(tmp_path).start()
    client = sidecar.connect()
    (lease,) = client.encode([image(1)])
    sidecar.kill()
    with pytest.raises(mmcache.ConnectionLost):
        client.stats()
    assert is_mapped()
    lease.release()
    del lease
    gc.collect()
    assert not is_mapped(), "while the client object is still there"
    client.close()


def test_close_acknowledges_all_but_held(sidecar: SidecarProcess) -> None:
    client = sidecar.connect()
    leases = client.encode([image(1), image(2), image(3)])
    held = leases[0].hold()
    expected = held.clone()
    client.close()
    client.close()
    with pytest.raises(mmcache.ClientClosed):
        client.encode([image(1)])
    with pytest.raises(mmcache.LeaseReleased):
        _ = leases[1].tensor
    eventually(lambda: sidecar.stats()["leases"]["active"] == 1, "only the held lease is left")
    assert sidecar.stats()["leases"]["quarantined"] == 1
    assert torch.equal(held, expected)
    del held, leases
    gc.collect()
    eventually(lambda: sidecar.stats()["leases"]["active"] == 0, "its storage died")


def test_more_leases_than_control_words(tmp_path: Path) -> None:
    with SidecarProcess(tmp_path, control_words="64") as sidecar, sidecar.connect() as client:
        results: list[Any] = client.encode([image(1)] * 80, errors="return")
        failed = [result for result in results if isinstance(result, mmcache.TooManyLeases)]
        assert len(failed) == 80 - 63
        assert "control_words" in failed[0].reason
        for result in results[:63]:
            result.release()
        client.encode([image(1)])[0].release()
