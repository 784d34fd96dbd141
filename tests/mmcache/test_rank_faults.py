"""Ranks that hang, run out of memory or cannot be started: the others and the service go on, and it is told."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmcache
from tests.mmcache.support import SidecarProcess, eventually, image
from tests.mmcache.weights import write_checkpoint

LIMIT_S = "4"
"""Far longer than anything here takes a rank that works."""
PATIENCE_S = 120.0
"""A rank's start takes seconds, and on a machine with much to do many."""
TOO_LARGE, SMALL = (1792, 1792), (112, 112)
ROOM_BYTES = 48 << 20
"""Of memory that a rank may take: less than the large picture needs, more than the small one."""


def ranks(client: mmcache.Client) -> dict[str, Any]:
    found = client.stats()["ranks"]
    assert isinstance(found, dict)
    return found


def rank_pids(client: mmcache.Client) -> list[int]:
    return [int(pid) for pid in ranks(client)["pids"]]


def all_ready(client: mmcache.Client) -> bool:
    return bool(ranks(client)["ready"] == ranks(client)["configured"])


def release(leases: list[Any]) -> None:
    for lease in leases:
        assert isinstance(lease, mmcache.Lease), lease
        lease.release()


def test_a_rank_that_hangs_with_a_batch_is_replaced_and_its_items_are_encoded_elsewhere(tmp_path: Path) -> None:
    with SidecarProcess(tmp_path, ranks="2", encode_timeout_s=LIMIT_S) as sidecar, sidecar.connect() as client:
        hit = image(1)
        release(client.encode([hit]))
        victim, other = rank_pids(client)
        os.kill(victim, signal.SIGSTOP)
        release(client.encode([image(seed, *SMALL) for seed in range(10, 26)]))
        eventually(lambda: all_ready(client), "it is replaced", PATIENCE_S)
        found = ranks(client)
        assert (found["hung"], found["restarts"], found["deaths"]) == (1, 1, {"hung": 1})
        assert victim not in found["pids"]
        assert other in found["pids"], "nobody else was touched"
        (lost,) = [one for one in found["by_rank"].values() if one["restarts"]]
        assert lost["state"] == "ready"
        assert "it did not encode a batch of" in lost["lost_because"]
        assert client.stats()["errors"] == {}
        assert client.leases(check=True)["problems"] == []


def test_hits_and_another_rank_go_on_while_one_hangs(tmp_path: Path) -> None:
    with SidecarProcess(tmp_path, ranks="2", encode_timeout_s="86400") as sidecar, sidecar.connect() as client:
        hits = [image(seed) for seed in range(4)]
        release(client.encode(hits))
        victim = rank_pids(client)[0]
        os.kill(victim, signal.SIGSTOP)
        handle = client.submit([image(seed, *SMALL) for seed in range(10, 14)])
        with sidecar.connect() as stranger:
            leases = stranger.encode(hits)
            assert {lease.origin for lease in leases} == {"pool"}
            release(leases)
        assert ranks(client)["ready"] == 2
        os.kill(victim, signal.SIGCONT)
        release(handle.result())
        assert ranks(client)["restarts"] == 0, "it was slow, and within its time"


def test_a_rank_that_hangs_with_a_copy_is_replaced(tmp_path: Path) -> None:
    with SidecarProcess(tmp_path, encode_timeout_s=LIMIT_S) as sidecar, sidecar.connect(timeout=PATIENCE_S) as client:
        (victim,) = rank_pids(client)
        os.kill(victim, signal.SIGSTOP)
        rows = np.arange(client.dim, dtype=np.float32)[None]
        key = mmcache.ContentKey((7).to_bytes(16, "big"))
        assert client.put(key, rows, (1, 2, 2))
        found = ranks(client)
        assert (found["hung"], victim in found["pids"]) == (1, False)
        assert f"it did not copy {rows.nbytes} bytes within {LIMIT_S} s" in sidecar.log()
        with client.encode([None], keys=[key])[0] as lease:
            np.testing.assert_array_equal(lease.numpy(), rows)


def test_a_sidecar_that_is_stopped_with_its_ranks_takes_none_of_them_for_hung(tmp_path: Path) -> None:
    """As when a container is paused: all of them stand still for longer than a rank may take."""
    with SidecarProcess(tmp_path, encode_timeout_s=LIMIT_S) as sidecar, sidecar.connect() as client:
        (rank,) = rank_pids(client)
        os.kill(rank, signal.SIGSTOP)
        handle = client.submit([image(1)])
        assert not handle.poll()
        sidecar.send_signal(signal.SIGSTOP)
        time.sleep(float(LIMIT_S) + 3.0)
        os.kill(rank, signal.SIGCONT)
        sidecar.send_signal(signal.SIGCONT)
        release(handle.result())
        assert (rank_pids(client), ranks(client)["restarts"]) == ([rank], 0)


@contextmanager
def little_memory(pid: int) -> Iterator[None]:
    """Hold a process to little more private memory than it has."""
    status = Path(f"/proc/{pid}/status").read_text()
    taken = 1024 * int(status.split("VmData:")[1].split()[0])
    before = resource.prlimit(pid, resource.RLIMIT_DATA, (taken + ROOM_BYTES, resource.RLIM_INFINITY))
    yield
    resource.prlimit(pid, resource.RLIMIT_DATA, before)


def test_a_rank_that_runs_out_of_memory_says_so_and_goes_on(sidecar: SidecarProcess) -> None:
    with sidecar.connect(timeout=PATIENCE_S) as client:
        release(client.encode([image(1, 448, 448)]))  # all of the rank's threads have worked
        (pid,) = rank_pids(client)
        unlimited = ranks(client)["by_rank"]["0"]["max_patches"]
        large = image(2, *TOO_LARGE)
        with little_memory(pid):
            (failure,) = client.encode([large], errors="return")
            assert isinstance(failure, mmcache.EncodeFailed)
            assert "out of memory" in str(failure)
            release(client.encode([image(seed, *SMALL) for seed in range(10, 14)]))
            found = ranks(client)
            assert found["out_of_memory"] >= 1
            assert 1 <= found["by_rank"]["0"]["max_patches"] < (TOO_LARGE[0] // 14) ** 2, "batches follow what is free"
        (lease,) = client.encode([large])
        assert lease.origin == "encoded", "the failure was kept by nobody"
        lease.release()
        found = ranks(client)
        assert (found["pids"], found["restarts"]) == ([pid], 0)
        seeds = iter(range(100, 10_000))

        def has_its_bound_back() -> bool:
            release(client.encode([image(next(seeds))]))
            return bool(ranks(client)["by_rank"]["0"]["max_patches"] == unlimited)

        eventually(has_its_bound_back, "the bound follows what is free", PATIENCE_S)
        assert client.leases(check=True)["problems"] == []


def test_no_rank_can_be_started_and_then_one_can(sidecar: SidecarProcess) -> None:
    """The sidecar has no descriptor left to make a process with."""
    with sidecar.connect(timeout=PATIENCE_S) as client:
        release(client.encode([image(1)]))
        store = client.stats()
        assert (store["ready"], store["ranks"]["outage"]) == (True, "")
        (pid,) = rank_pids(client)
        before = resource.prlimit(sidecar.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(sidecar.pid, resource.RLIMIT_NOFILE, (3, before[1]))
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not client.stats()["ready"], "it has tried three times", PATIENCE_S)
        found = ranks(client)
        assert "rank 0: the last 3 tries to start one failed: its process cannot be started" in found["outage"]
        assert (found["ready"], found["by_rank"]["0"]["state"]) == (0, "lost")
        assert found["deaths"] == {"died": 1, "spawn": 3}
        resource.prlimit(sidecar.pid, resource.RLIMIT_NOFILE, before)
        eventually(lambda: bool(client.stats()["ready"]), "one is warm", PATIENCE_S)
        assert ranks(client)["outage"] == ""
        release(client.encode([image(2)]))


def test_one_death_is_no_outage(sidecar: SidecarProcess) -> None:
    with sidecar.connect(timeout=PATIENCE_S) as client:
        (pid,) = rank_pids(client)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: ranks(client)["ready"] == 0, "its death was seen")
        assert client.stats()["ready"], "one is expected back"
        release(client.encode([image(1)]))
        assert ranks(client)["deaths"] == {"died": 1}


def test_a_checkpoint_that_changed_under_the_only_rank_is_an_outage_until_a_reload(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", 1)
    with SidecarProcess(tmp_path, model=str(folder)) as sidecar, sidecar.connect(timeout=PATIENCE_S) as client:
        write_checkpoint(folder, 2)
        (pid,) = rank_pids(client)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not client.stats()["ready"], "the new rank has read other weights", PATIENCE_S)
        assert "have changed since it was loaded; `mmcache reload`" in ranks(client)["outage"]
        assert ranks(client)["by_rank"]["0"]["state"] == "stale"
        client.reload(folder)
        assert client.stats()["ready"]
        release(client.encode([image(1)]))


def test_a_hang_ends_a_reload_that_waits_for_it(tmp_path: Path) -> None:
    """A reload lets the batch under way end first: with a rank that hangs it would wait for ever."""
    with (
        SidecarProcess(tmp_path, ranks="2", encode_timeout_s=LIMIT_S) as sidecar,
        sidecar.connect(timeout=60) as client,
    ):
        os.kill(rank_pids(client)[0], signal.SIGSTOP)
        handle = client.submit([image(seed, *SMALL) for seed in range(10, 26)])
        eventually(lambda: handle.poll() or client.stats()["encode"]["queued"] > 0, "it has its batch")
        done: list[object] = []
        reloading = threading.Thread(target=lambda: done.append(sidecar_reload(sidecar)))
        reloading.start()
        release(handle.result())
        reloading.join(PATIENCE_S)
        assert done, "it ended"
        assert ranks(client)["hung"] == 1


def sidecar_reload(sidecar: SidecarProcess) -> object:
    with sidecar.connect(timeout=PATIENCE_S) as client:
        try:
            return client.reload("moonvit-tiny")
        except mmcache.SidecarError as error:  # the rank died while it loaded: nothing has changed
            return error


@pytest.mark.parametrize("value", ["0", "0.5", "-1", "nan", "inf", "90000", "soon", "true"])
def test_wrong_limits(value: str) -> None:
    from mmcache.config_sources import load_settings

    with pytest.raises(mmcache.ConfigError, match=r"encode_timeout_s = .*must be auto or a number, 1 to 86400"):
        load_settings({"encode_timeout_s": value}, {"HOME": "/users/someone"})
    assert load_settings({"encode_timeout_s": "2.5"}, {"HOME": "/users/someone"}).encode_timeout_s == 2.5


def test_five_hundred_images_at_once_are_bounded_batches(sidecar: SidecarProcess) -> None:
    with sidecar.connect(timeout=PATIENCE_S) as client:
        before = client.stats()
        items = [image(5000 + seed, 56, 84 if seed % 2 else 56) for seed in range(500)]
        for lease in client.encode(items):
            lease.release()
        after = client.stats()
        patches = sum((item.shape[0] // 14) * (item.shape[1] // 14) for item in items)
        bound = max(rank["max_patches"] for rank in after["ranks"]["by_rank"].values())
        assert after["encode"]["batches"] - before["encode"]["batches"] >= patches // bound
        assert after["ranks"]["out_of_memory"] == before["ranks"]["out_of_memory"]
        assert after["ranks"]["restarts"] == before["ranks"]["restarts"]
