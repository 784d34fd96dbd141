"""New weights at run time: no request is lost, and no embedding is of other weights than it says."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmcache
from tests.mmcache.reloads import PICTURES, assert_same, encoded, kill_ranks
from tests.mmcache.support import SidecarProcess, eventually, image
from tests.mmcache.weights import CONFIG, write_checkpoint


def test_everything_that_a_reload_changes(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    a, b = folders
    store = f"file://{tmp_path}/store.lmdb"
    with SidecarProcess(tmp_path, model=str(a), store=store, ranks="2", deterministic="true") as sidecar:
        with sidecar.connect() as client, sidecar.connect() as other:
            first = client.fingerprint
            of_a = encoded(client, "encoded")
            held = client.encode(PICTURES)
            second = client.reload(b)
            assert second == client.fingerprint != first
            of_b = encoded(client, "encoded")
            assert not any(np.array_equal(one, two) for one, two in zip(of_a, of_b, strict=True))
            assert_same(encoded(client, "pool"), of_b)
            for lease in held:
                assert lease.fingerprint == first
                assert not lease.is_released
            assert_same([lease.numpy() for lease in held], of_a)
            assert other.fingerprint == first, "it has heard nothing yet"
            assert_same(encoded(other, "pool"), of_b)
            assert other.fingerprint == second
            stats = client.stats()
            assert (stats["model"], stats["fingerprint"], stats["reloads"]) == (str(b), str(second), 1)
            assert stats["leases"]["active"] == len(held)
            for lease in held:
                lease.release()
            eventually(lambda: client.stats()["store"]["queued"] == 0, "both models' embeddings are stored")
            assert client.reload(a) == first
            assert_same(encoded(client, "store"), of_a)
            assert client.reload(b) == second
            assert_same(encoded(client, "store"), of_b)
            assert client.stats()["pool"]["entries"] == len(PICTURES), "the old models' entries are discarded"
        with SidecarProcess(tmp_path / "state", model=str(b)) as fresh:
            assert fresh.stats()["fingerprint"] != str(second), "deterministic is part of it"
        assert sidecar.stop() == 0


def test_the_same_weights_again_keep_everything(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    a, _ = folders
    moved = write_checkpoint(tmp_path / "moved", 1, num_shards=5)
    with SidecarProcess(tmp_path, model=str(a)) as sidecar, sidecar.connect() as client:
        first = client.fingerprint
        of_a = encoded(client, "encoded")
        assert client.reload() == first
        assert_same(encoded(client, "pool"), of_a)
        assert client.reload(moved) == first
        assert_same(encoded(client, "pool"), of_a)
        assert (client.stats()["model"], client.stats()["reloads"]) == (str(moved), 2)
        kill_ranks(client)
        assert_same(encoded(client, "encoded"), of_a)


def test_weights_replaced_in_place(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    """A rank that dies afterwards has read the new ones: it takes no work before the reload says so."""
    a, _ = folders
    with SidecarProcess(tmp_path, model=str(a), ranks="2") as sidecar, sidecar.connect() as client:
        first = client.fingerprint
        of_a = encoded(client, "encoded")
        write_checkpoint(a, 3)
        os.kill(client.stats()["ranks"]["pids"][0], signal.SIGKILL)
        eventually(lambda: "takes no work: the files of" in sidecar.log(), "the new rank has other weights")
        assert (client.stats()["ranks"]["ready"], len(client.stats()["ranks"]["pids"])) == (1, 2)
        fresh = [image(seed) for seed in range(20, 24)]
        encoded(client, "encoded", fresh)
        assert client.fingerprint == first
        assert client.reload() != first
        assert client.stats()["ranks"]["ready"] == 2
        of_c = encoded(client, "encoded")
        assert not any(np.array_equal(one, two) for one, two in zip(of_a, of_c, strict=True))


def test_another_width_and_another_processor(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    """Traffic goes on while embeddings change their size: no extent of one size is used for the other."""
    a, _ = folders
    wide = write_checkpoint(
        tmp_path / "wide", 4, dataclasses.replace(CONFIG, text_width=80), processor={"in_patch_limit": 16}
    )
    with SidecarProcess(tmp_path, model=str(a), ranks="2", pool_bytes="1MiB") as sidecar:
        traffic = [Traffic(sidecar, seed) for seed in range(3)]
        with sidecar.connect() as client:
            for turn in range(4):
                client.reload(wide if turn % 2 == 0 else a)
                width, most = (80, 8) if turn % 2 == 0 else (32, 1 << 30)
                assert client.dim == width
                for lease in client.encode(PICTURES):
                    with lease:
                        assert lease.tensor.shape == (lease.num_tokens, width)
                        assert lease.num_tokens <= most
            for each in traffic:
                each.end()
            assert client.stats()["errors"] == {}
            eventually(lambda: client.stats()["pool"]["bytes_leased"] == 0, "every lease has ended")
    assert min(each.num_requests for each in traffic) > 0


class Traffic(threading.Thread):
    """A client that encodes without a pause, and keeps what it got of `PICTURES` by fingerprint."""

    def __init__(self, sidecar: SidecarProcess, seed: int) -> None:
        super().__init__()
        self._sidecar = sidecar
        self._random = np.random.default_rng(seed)
        self._is_over = threading.Event()
        self._fault: BaseException | None = None
        self.found: dict[str, dict[int, Any]] = {}
        self.num_requests = 0
        self.start()

    def run(self) -> None:
        try:
            with self._sidecar.connect() as client:
                while not self._is_over.is_set():
                    self._request(client)
        except BaseException as fault:
            self._fault = fault

    def _request(self, client: mmcache.Client) -> None:
        chosen = self._random.permutation(len(PICTURES))[:4].tolist()
        fresh = [image(int(seed)) for seed in self._random.integers(1000, 1 << 40, 2)]
        leases = client.encode([*(PICTURES[index] for index in chosen), *fresh])
        for index, lease in zip(chosen, leases, strict=False):
            seen = self.found.setdefault(str(lease.fingerprint), {})
            assert np.array_equal(seen.setdefault(index, lease.numpy().copy()), lease.numpy())
        for lease in leases:
            assert lease.dim == lease.numpy().shape[1]
            lease.release()
        self.num_requests += 1

    def end(self) -> None:
        self._is_over.set()
        self.join()
        if self._fault is not None:
            raise self._fault


@pytest.mark.parametrize("has_store", [False, True])
def test_traffic_through_reloads(tmp_path: Path, folders: tuple[Path, Path], has_store: bool) -> None:
    """Three clients: no request fails, every embedding is of the model that it says, and after a reload of that one."""
    a, b = folders
    store = f"file://{tmp_path}/store.lmdb" if has_store else "none"
    settings = {"model": str(a), "ranks": "2", "deterministic": "true", "store": store, "verify_sample": "3"}
    with SidecarProcess(tmp_path, **settings) as sidecar, sidecar.connect() as client:
        expected = {str(client.fingerprint): encoded(client, "encoded")}
        client.reload(b)
        expected[str(client.fingerprint)] = encoded(client, "encoded")
        traffic = [Traffic(sidecar, seed) for seed in range(3)]
        for turn in range(10):
            fingerprint = str(client.reload(a if turn % 2 == 0 else b))
            leases = client.encode(PICTURES)
            assert {str(lease.fingerprint) for lease in leases} == {fingerprint}
            assert_same([lease.numpy() for lease in leases], expected[fingerprint])
            for lease in leases:
                lease.release()
        for each in traffic:
            each.end()
        stats = client.stats()
    assert (stats["errors"], stats["reloads"], stats["verify"]["mismatched"]) == ({}, 11, 0)
    assert len(expected) == 2
    for each in traffic:
        assert each.found.keys() <= expected.keys()
        for fingerprint, arrays in each.found.items():
            for index, array in arrays.items():
                np.testing.assert_array_equal(array, expected[fingerprint][index])
    assert {fingerprint for each in traffic for fingerprint in each.found} == expected.keys()
