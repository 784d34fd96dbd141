"""Encoding on a device inside an engine's own process, and within little memory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import mmcache
from tests.mmcache.gpu_clients import bytes_used, sidecar_on_cuda
from tests.mmcache.support import eventually, image

pytestmark = pytest.mark.gpu

SMALL: dict[str, Any] = {"pool_bytes": "64MiB", "ingest_bytes": "32MiB", "dtype": "bfloat16"}
MIB = 1 << 20


def release(leases: list[mmcache.Lease]) -> None:
    for lease in leases:
        lease.release()


def test_inside_the_engines_own_process(tmp_path: Path) -> None:
    items = [image(seed, 224, 336) for seed in range(8)]
    with sidecar_on_cuda(tmp_path / "beside", dtype="float32") as sidecar, sidecar.connect() as other:
        leases = other.encode(items)
        expected = [lease.tensor.double() for lease in leases]
        release(leases)
    with mmcache.local(device="cuda", state=tmp_path, **SMALL) as client:
        for origin in ("encoded", "pool"):
            for lease, truth in zip(client.encode(items), expected, strict=True):
                assert (lease.origin, lease.tensor.device.type, lease.tensor.dtype) == (origin, "cuda", torch.bfloat16)
                cosine = torch.nn.functional.cosine_similarity(lease.tensor.double(), truth, dim=-1)
                assert cosine.min() > 0.999
                lease.release()
    torch.cuda.synchronize()


def test_memory_comes_back_from_inside(tmp_path: Path) -> None:
    used: list[int] = []

    def settled() -> bool:  # memory is unmapped a while after its last tensor is gone
        torch.cuda.synchronize()
        used.append(bytes_used() // MIB)
        return used[-1] - used[0] < 32

    for _ in range(3):
        with mmcache.local(device="cuda", state=tmp_path, **SMALL) as client:
            (lease,) = client.encode([image(1, 448, 448)])
            assert lease.tensor.isfinite().all()
            lease.release()
        del lease, client
        if not used:
            time.sleep(2.0)
        eventually(settled, f"what was mapped is unmapped, what was allocated is freed: {used} MiB")


def test_five_hundred_images_at_once_within_little_memory(tmp_path: Path) -> None:
    settings = {"dtype": "bfloat16", "pool_bytes": "1GiB", "device_bytes": str(384 * MIB)}
    with sidecar_on_cuda(tmp_path, **settings) as sidecar, sidecar.connect(timeout=120) as client:
        bound = client.stats()["ranks"]["by_rank"]["0"]["max_patches"]
        assert 1024 < bound < 500 * 768, "less than all, more than one"
        items = [image(seed, 448, 448 if seed % 2 else 224) for seed in range(500)]
        leases = client.encode(items)
        assert all(bool(lease.tensor.isfinite().all()) for lease in leases[::50])
        release(leases)
        stats = client.stats()
        assert stats["ranks"]["out_of_memory"] == stats["ranks"]["restarts"] == 0
        assert stats["encode"]["batches"] >= min(500, 500 * 768 // bound)
