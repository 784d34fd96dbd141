"""Sidecars and their file store: two on one file, and one whose disk is full."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np

from tests.mmcache.places import big, release
from tests.mmcache.support import SidecarProcess, eventually, image


def test_two_sidecars_share_one_file(tmp_path: Path) -> None:
    """Each serves what the other has stored, bit for bit, while both write; one killed, the other goes on."""
    shared = {"state": str(tmp_path / "state"), "store": f"file://{tmp_path}/store.lmdb"}
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    with SidecarProcess(folders[0], **shared) as one, SidecarProcess(folders[1], **shared) as two:
        with one.connect() as first, two.connect() as second:
            for sidecar, other, seeds in ((first, second, range(6)), (second, first, range(6, 12))):
                pictures = [image(seed) for seed in seeds]
                leases = sidecar.encode(pictures)
                eventually(lambda sidecar=sidecar: sidecar.stats()["store"]["queued_bytes"] == 0, "stored")
                theirs = other.encode(pictures)
                assert {lease.origin for lease in theirs} == {"store"}
                for mine, its in zip(leases, theirs, strict=True):
                    np.testing.assert_array_equal(mine.numpy(), its.numpy())
                release(leases + theirs)
            first.evict([first.key(image(7))])
            assert second.stats()["store"]["tiers"]["lmdb"]["damaged"] == 0
            one.kill()
            release(second.encode([image(seed) for seed in range(20, 24)]))
            eventually(lambda: second.stats()["store"]["queued_bytes"] == 0, "stored")
            assert second.stats()["store"]["write_failed"] == 0
        with SidecarProcess(folders[0], **shared) as again, again.connect() as client:
            leases = client.encode([image(seed) for seed in (0, 6, 20)])
            assert {lease.origin for lease in leases} == {"store"}
            release(leases)


def test_a_full_disk_costs_no_request_anything(tmp_path: Path) -> None:
    """As a limit on the size of files, which is what a full disk is to the sidecar: a write that fails."""
    store = tmp_path / "store.lmdb"
    settings = {"store": f"file://{store}", "pool_bytes": "1MiB", "control_words": "64"}
    with SidecarProcess(tmp_path, **settings) as sidecar, sidecar.connect() as client:
        release(client.encode(big(1)))
        eventually(lambda: client.stats()["store"]["written"] == 1, "the first is stored")
        limits = resource.prlimit(sidecar.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(sidecar.pid, resource.RLIMIT_FSIZE, (store.stat().st_size + (512 << 10), limits[1]))
        for seed in range(2, 12):
            release(client.encode(big(seed)))
        eventually(lambda: client.stats()["store"]["queued_bytes"] == 0, "each was written or failed")
        stats = client.stats()
        assert stats["store"]["write_failed"] > 0
        assert stats["errors"] == {}
        assert "requests go on without it" in sidecar.log()
        leases = client.encode(big(1))
        assert leases[0].origin == "store"
        release(leases)
        resource.prlimit(sidecar.pid, resource.RLIMIT_FSIZE, limits)
        written = client.stats()["store"]["written"]
        release(client.encode(big(12)))
        eventually(lambda: client.stats()["store"]["written"] == written + 1, "there is room again")
        assert os.stat(store).st_size > 0
