"""A sidecar takes as much as it can carry: what is beyond fails at once, and what costs nothing is always served."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mmcache
from tests.mmcache.places import release
from tests.mmcache.support import SidecarProcess, eventually, image

MOST = 4


@contextmanager
def stopped_rank(sidecar: SidecarProcess) -> Iterator[None]:
    """Nothing is encoded meanwhile."""
    (pid,) = sidecar.stats()["ranks"]["pids"]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def flights(sidecar: SidecarProcess) -> int:
    number = sidecar.stats()["queue"]["flights"]
    assert isinstance(number, int)
    return number


def test_what_is_beyond_the_bound_fails_at_once(tmp_path: Path) -> None:
    with SidecarProcess(tmp_path, max_queued_items=str(MOST)) as sidecar:
        with sidecar.connect() as one, sidecar.connect() as two:
            release(one.encode([image(100)]))
            with stopped_rank(sidecar):
                full = one.submit([image(seed) for seed in range(MOST)])
                eventually(lambda: flights(sidecar) == MOST, "as many as may be")
                hit, *refused = two.encode([image(100), image(50), image(51)], errors="return")
                assert isinstance(hit, mmcache.Lease), "a hit is never refused"
                assert [type(error) for error in refused] == [mmcache.Overloaded] * 2
                assert "max_queued_items" in str(refused[0])
                joined = two.submit([image(seed) for seed in range(MOST)])
                eventually(lambda: sidecar.stats()["items"]["joined"] == MOST, "who joins is never refused")
                assert sidecar.stats()["errors"] == {"Overloaded": 2}
            hit.release()
            release(full.result())
            release(joined.result())
            release(two.encode([image(50), image(51)]))
        queue = sidecar.stats()["queue"]
        names = ("flights", "interactive", "bulk", "seconds", "announced_patches")
        assert {name: queue[name] for name in names} == dict.fromkeys(names, 0), "the books are even"


def test_part_of_a_call_is_taken(tmp_path: Path) -> None:
    with SidecarProcess(tmp_path, max_queued_items=str(MOST)) as sidecar, sidecar.connect() as client:
        results = client.encode([image(seed) for seed in range(10)], errors="return")
        leases = [result for result in results if isinstance(result, mmcache.Lease)]
        assert len(leases) == MOST, "one call comes at once"
        assert results[:MOST] == leases
        assert all(isinstance(result, mmcache.Overloaded) for result in results[MOST:])
        release(leases)
        with sidecar.connect() as other:
            release(other.encode([image(9)]))


def test_without_a_rank_misses_fail_and_hits_go_on(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    """Its model's files are gone, so that no rank can start again."""
    model, _ = folders
    with SidecarProcess(tmp_path, model=str(model)) as sidecar, sidecar.connect() as client:
        release(client.encode([image(1)]))
        (held,) = client.encode([image(2)])
        shutil.rmtree(model)
        (rank,) = sidecar.stats()["ranks"]["pids"]
        os.kill(rank, signal.SIGSTOP)
        waiting = client.submit([image(3)], errors="return")
        eventually(lambda: sidecar.stats()["queue"]["flights"] == 1, "it is under way")
        os.kill(rank, signal.SIGKILL)
        (lost,) = waiting.result()
        assert isinstance(lost, mmcache.NoRanks), "long before its deadline"
        (late,) = client.encode([image(4)], errors="return")
        assert isinstance(late, mmcache.NoRanks)
        assert "rank 0" in str(late), "it says why"
        assert held.numpy().any(), "what is held stays readable"
        held.release()


def test_a_deadline_without_a_rank_says_so(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as client, sidecar.connect(timeout=0.3) as hasty:
        (rank,) = sidecar.stats()["ranks"]["pids"]
        os.kill(rank, signal.SIGKILL)
        eventually(lambda: sidecar.stats()["ranks"]["ready"] == 0, "the rank is lost")
        (error,) = hasty.encode([image(1)], errors="return")
        assert isinstance(error, mmcache.NoRanks)
        with client.encode([image(1)])[0] as lease:
            assert lease.origin == "encoded", "the next one waits for the new rank"
