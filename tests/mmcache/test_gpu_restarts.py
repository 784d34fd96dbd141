"""Device memory that outlives the rank that wrote it, and embeddings that outlive the sidecar."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import mmcache
from tests.mmcache.gpu_clients import bytes_used, sidecar_on_cuda, start_client
from tests.mmcache.support import eventually, image

pytestmark = pytest.mark.gpu


def rank_pid(client: mmcache.Client) -> int:
    (pid,) = client.stats()["ranks"]["pids"]
    return int(pid)


def test_from_the_store_after_a_restart(tmp_path: Path) -> None:
    with sidecar_on_cuda(tmp_path, store="auto") as sidecar, sidecar.connect() as client:
        (lease,) = client.encode([image(1)])
        expected = lease.tensor.cpu()
        lease.release()
        eventually(lambda: client.stats()["store"]["written"] == 1, "it is stored")
    with sidecar_on_cuda(tmp_path, store="auto") as sidecar, sidecar.connect() as client:
        (lease,) = client.encode([image(1)])
        assert lease.origin == "store"
        assert torch.equal(lease.tensor.cpu(), expected)
        lease.release()


def test_verification_on_the_device(tmp_path: Path) -> None:
    with sidecar_on_cuda(tmp_path, verify_sample="1") as sidecar, sidecar.connect() as client:
        for _ in range(3):
            client.encode([image(1)])[0].release()
        eventually(lambda: client.stats()["verify"]["matched"] >= 1, "a hit was encoded again")
        assert client.stats()["verify"]["mismatched"] == 0


READ_ON = """
expected = torch.from_numpy(np.load(sys.argv[2])).cuda()
(lease,) = client.encode([image(1)])
wrong = torch.zeros((), dtype=torch.int64, device="cuda")
num = 0
print("reading", flush=True)
while not __import__("os").path.exists(sys.argv[3]):
    with client.encode([image(1)])[0] as other:
        assert other.origin == "pool", other.origin
        wrong += (other.tensor != expected).sum() + (lease.tensor != expected).sum()
    num += 1
lease.release()
print(num, int(wrong), flush=True)
"""


def test_a_killed_rank_goes_on_with_the_pool_that_it_left(tmp_path: Path) -> None:
    with sidecar_on_cuda(tmp_path, pool_bytes="2GiB") as sidecar, sidecar.connect() as client:
        (lease,) = client.encode([image(1)])
        others = client.encode([image(seed) for seed in range(2, 12)])
        expected = [other.tensor.clone() for other in others]
        np.save(tmp_path / "expected.npy", lease.tensor.cpu().numpy())
        paths = [str(tmp_path / "expected.npy"), str(tmp_path / "stop")]
        readers = [start_client(sidecar, READ_ON, tmp_path / f"reader{index}", *paths) for index in range(4)]
        outs = [tmp_path / f"reader{index}.out" for index in range(4)]
        eventually(lambda: all("reading" in out.read_text() for out in outs), "they read", 60)
        before, pid = bytes_used(), rank_pid(client)
        for _ in range(3):
            os.kill(pid, signal.SIGKILL)
            eventually(lambda: client.stats()["ranks"]["ready"] == 0, "it is dead")
            assert client.encode([image(5)])[0].origin == "pool", "without a rank"
            eventually(lambda: client.stats()["ranks"]["ready"] == 1, "it is replaced", 60)
            assert rank_pid(client) != pid
            pid = rank_pid(client)
            for other, tensor in zip(others, expected, strict=True):
                assert torch.equal(other.tensor, tensor)
            assert [one.origin for one in client.encode([image(seed) for seed in range(1, 12)])] == ["pool"] * 11
            (new,) = client.encode([image(100 + pid)])
            assert new.origin == "encoded", "the new rank writes there"
            assert bool(new.tensor.isfinite().all())
            assert bytes_used() < before + (1 << 30), "no second pool"
        (tmp_path / "stop").touch()
        for reader, out in zip(readers, outs, strict=True):
            assert reader.wait(60) == 0, out.with_suffix(".err").read_text()
            num, wrong = map(int, out.read_text().splitlines()[1].split())
            assert num > 10
            assert wrong == 0
        stats = client.stats()
        assert (stats["ranks"]["restarts"], stats["pool"]["entries"]) == (3, 14)
        assert client.leases(check=True)["problems"] == []


def test_memory_is_given_back(tmp_path: Path) -> None:
    torch.cuda.init()
    before = bytes_used()
    with sidecar_on_cuda(tmp_path, pool_bytes="4GiB") as sidecar, sidecar.connect() as client:
        (lease,) = client.encode([image(1)])
        tensor, expected = lease.tensor, lease.tensor.clone()
        assert bytes_used() >= before + (4 << 30)
        sidecar.kill()
        time.sleep(1.0)
        assert torch.equal(tensor, expected), "it is read on"
        with pytest.raises(mmcache.ConnectionLost):
            client.stats()
        del tensor
        lease.release()
    torch.cuda.synchronize()
    eventually(lambda: bytes_used() < before + (1 << 30), "the last mapping is gone, and so is the memory")
