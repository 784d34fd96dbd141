"""Reloads for tests: two sets of weights, threads that reload, and ranks that are stopped or killed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import mmcache
from tests.mmcache.support import SidecarProcess, eventually, image, is_alive

PICTURES = [image(seed, 28 + 14 * seed, 84) for seed in range(6)]
Arrays = list[Any]


def encoded(client: mmcache.Client, origin: str, pictures: Arrays = PICTURES) -> Arrays:
    """The embeddings of the pictures, all of one origin, and of the model that the client knows of."""
    leases = client.encode(pictures)
    arrays = []
    for lease in leases:
        with lease:
            assert (lease.origin, lease.fingerprint) == (origin, client.fingerprint)
            arrays.append(lease.numpy().copy())
    return arrays


def assert_same(ours: Arrays, theirs: Arrays) -> None:
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A rank that answers nothing meanwhile: a reload under way stays under way."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        if is_alive(pid):
            os.kill(pid, signal.SIGCONT)


class Reload(threading.Thread):
    """A reload by a client of its own."""

    def __init__(self, sidecar: SidecarProcess, model: Path | None) -> None:
        super().__init__()
        self._sidecar, self._model = sidecar, model
        self.result: mmcache.Fingerprint | mmcache.MMCacheError | None = None
        self.start()

    def run(self) -> None:
        with self._sidecar.connect() as client:
            try:
                self.result = client.reload(self._model)
            except mmcache.MMCacheError as error:
                self.result = error


def kill_ranks(client: mmcache.Client) -> None:
    """Returns when the sidecar has noticed."""
    ranks = client.stats()["ranks"]
    for pid in ranks["pids"]:
        os.kill(pid, signal.SIGKILL)
    noticed = ranks["restarts"] + len(ranks["pids"])
    eventually(lambda: client.stats()["ranks"]["restarts"] == noticed, "the ranks are replaced")


def under_way(sidecar: SidecarProcess, reloads: int) -> None:
    eventually(lambda: sidecar.log().count("reload: loading") == reloads, "the reload has begun")
