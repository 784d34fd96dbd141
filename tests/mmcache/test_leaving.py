"""Who leaves a queue frees what they had there at once, and whoever else wants it gets it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

import mmcache
from tests.mmcache.places import SIDE, python, release
from tests.mmcache.support import SidecarProcess, eventually, image

ONE = SIDE * SIDE * 3
"""Bytes of a picture's pixels."""
NUM = 8
MANY = """
import sys
import mmcache
from tests.mmcache.places import big
client = mmcache.connect(sys.argv[1], timeout=600)
call = client.submit(big(*range(8)))
while not call.poll():
    pass
"""


class Scene:
    """One rank that is stopped with one item in its hands, and another client's eight behind it."""

    def __init__(self, sidecar: SidecarProcess, observer: mmcache.Client) -> None:
        self.observer = observer
        self._sidecar = sidecar
        (self.rank,) = observer.stats()["ranks"]["pids"]
        os.kill(self.rank, signal.SIGSTOP)
        self.slow = observer.submit([image(100, SIDE, SIDE)])
        eventually(lambda: self.slow.poll() or self.is_so(1, 0), "one is in flight")
        self.process: subprocess.Popen[str] | None = None

    def is_so(self, num_pixels: int, num_queued: int) -> bool:
        """Whether so many pictures are decoded, and so many wait for a rank."""
        stats = self.observer.stats()
        queue = stats["queue"]
        is_queued = queue["interactive"] + queue["bulk"] == num_queued
        return bool(is_queued and stats["ingest"]["bytes_used"] == num_pixels * ONE)

    def many(self) -> subprocess.Popen[str]:
        process = python(MANY, str(self._sidecar.socket))
        eventually(lambda: self.is_so(1 + NUM, NUM), "eight wait for the rank", 60)
        return process

    def end(self) -> None:
        os.kill(self.rank, signal.SIGCONT)
        release(self.slow.result())


def test_what_a_dead_client_queued_is_gone_at_once(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as observer:
        scene = Scene(sidecar, observer)
        process = scene.many()
        process.kill()
        process.communicate()
        eventually(lambda: scene.is_so(1, 0), "only what the rank has in its hands is left")
        assert observer.stats()["queue"]["flights"] == 1
        scene.end()
        eventually(lambda: scene.is_so(0, 0), "nothing is left")
        assert observer.stats()["items"]["encoded"] == 1


def test_staged_pixels_in_the_ranks_hands_keep_no_ingest_memory(sidecar: SidecarProcess) -> None:
    """The item that runs was staged: as soon as the dead client's are gone there is nothing in the ingest region."""
    with sidecar.connect() as observer:
        (rank,) = observer.stats()["ranks"]["pids"]
        ref = observer.stage(image(100, SIDE, SIDE))
        os.kill(rank, signal.SIGSTOP)
        slow = observer.submit([ref])
        eventually(lambda: slow.poll() or observer.stats()["encode"]["queued"] == 1, "it is in flight")
        process = python(MANY, str(sidecar.socket))
        eventually(lambda: observer.stats()["ingest"]["bytes_used"] == NUM * ONE, "eight are decoded", 60)
        process.kill()
        process.communicate()
        eventually(lambda: observer.stats()["ingest"]["bytes_used"] == 0, "they are gone, and the rank is at work")
        assert observer.stats()["encode"]["queued"] == 1
        os.kill(rank, signal.SIGCONT)
        release(slow.result())


def cancels(call: mmcache.Handle, _: mmcache.Client) -> None:
    call.cancel()


def closes(_: mmcache.Handle, client: mmcache.Client) -> None:
    client._pump.channel.close()


@pytest.mark.parametrize("leave", [cancels, closes])
def test_what_others_wait_for_goes_on(
    sidecar: SidecarProcess, leave: Callable[[mmcache.Handle, mmcache.Client], None]
) -> None:
    with sidecar.connect() as observer, sidecar.connect() as patient:
        leaving = sidecar.connect()
        scene = Scene(sidecar, observer)
        pictures = [image(seed, SIDE, SIDE) for seed in range(NUM)]
        call = leaving.submit(pictures)
        eventually(lambda: call.poll() or scene.is_so(1 + NUM, NUM), "eight wait for the rank")
        shared = patient.submit(pictures[3:5])
        eventually(lambda: observer.stats()["items"]["joined"] == 2, "two of them are wanted twice")
        leave(call, leaving)
        eventually(lambda: scene.is_so(3, 2), "these two stay")
        scene.end()
        leases = shared.result()
        assert [lease.origin for lease in leases] == ["encoded"] * 2
        release(leases)
        assert observer.stats()["items"]["encoded"] == 3
        if leave is cancels:
            release(leaving.encode(pictures[:1]))
            leaving.close()


def test_what_is_late_leaves_the_queue(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as observer, sidecar.connect(timeout=3) as client:
        scene = Scene(sidecar, observer)
        results: list[Any] = client.encode([image(1, SIDE, SIDE)], errors="return")
        assert isinstance(results[0], mmcache.DeadlineExceeded)
        assert "waiting for a rank" in str(results[0])
        eventually(lambda: scene.is_so(1, 0), "its pixels are gone")
        scene.end()


def test_who_comes_back_at_once_is_served(sidecar: SidecarProcess) -> None:
    """Cancelled and asked for again before the sidecar has cleared it away."""
    with sidecar.connect() as observer, sidecar.connect() as client:
        scene = Scene(sidecar, observer)
        picture = image(1, SIDE, SIDE)
        for _ in range(5):
            call = client.submit([picture])
            eventually(lambda call=call: call.poll() or scene.is_so(2, 1), "it waits for the rank")
            call.cancel()
        last = client.submit([picture])
        eventually(lambda: last.poll() or scene.is_so(2, 1), "it waits for the rank")
        scene.end()
        release(last.result())
        assert observer.stats()["items"]["encoded"] == 2
