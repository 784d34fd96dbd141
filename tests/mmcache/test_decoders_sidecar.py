"""Several decoders in a sidecar."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np

import mmcache
from tests.mmcache.support import SidecarProcess, eventually
from tests.mmcache.test_decoders import by_pillow, picture


def test_all_decoders_are_killed_during_a_call(tmp_path: Path) -> None:
    """Ready means that all are up. What the files give is what arrays of their pixels give, which were not at risk."""
    files = [picture(number) for number in range(24)]
    with SidecarProcess(tmp_path, decoders="3") as sidecar, sidecar.connect() as client:
        before = client.stats()["decoders"]
        assert (before["configured"], before["ready"], len(before["pids"])) == (3, 3, 3)
        handle = client.submit(files, errors="return")
        for pid in before["pids"]:
            os.kill(pid, signal.SIGKILL)
        leases = handle.result()
        expected = client.encode([by_pillow(data) for data in files])
        for lease, array in zip(leases, expected, strict=True):
            assert isinstance(lease, mmcache.Lease), lease
            np.testing.assert_allclose(lease.numpy(), array.numpy(), rtol=1e-4, atol=1e-5)
            lease.release()
            array.release()
        eventually(lambda: client.stats()["decoders"]["ready"] == 3, "each is replaced")
        after = client.stats()
        assert after["decoders"]["restarts"] >= 3
        assert after["decoders"]["queued"] == after["decoders"]["in_hand"] == after["ingest"]["bytes_used"] == 0
