"""New weights at run time: no request is lost, and no embedding is of other weights than it says."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmcache
from tests.mmcache.support import MMCACHE, SidecarProcess, clean_environ, eventually, image, is_alive
from tests.mmcache.weights import CONFIG, write_checkpoint

PICTURES = [image(seed, 28 + 14 * seed, 84) for seed in range(6)]
Arrays = list[Any]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    return write_checkpoint(tmp_path / "a", 1), write_checkpoint(tmp_path / "b", 2)


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


def test_what_cannot_be_loaded_changes_nothing(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    a, b = folders
    (b / "model.safetensors").write_bytes((b / "model.safetensors").read_bytes()[:-1000])
    with SidecarProcess(tmp_path, model=str(a), ranks="2") as sidecar, sidecar.connect() as client:
        before, of_a = client.fingerprint, encoded(client, "encoded")
        with pytest.raises(mmcache.CheckpointError, match=r"model = .*model\.safetensors"):
            client.reload(b)
        (b / "config.json").write_text("{")
        with pytest.raises(mmcache.ConfigError, match=r"model = .*config\.json"):
            client.reload(b)
        with pytest.raises(mmcache.ConfigError, match="neither a folder nor a preset"):
            client.reload("no-such-model")
        assert (client.fingerprint, client.stats()["reloads"]) == (before, 0)
        assert_same(encoded(client, "pool"), of_a)
        (victim, _) = client.stats()["ranks"]["pids"]
        os.kill(victim, signal.SIGKILL)
        eventually(lambda: client.stats()["ranks"]["ready"] == 2, "it comes back with the model that is served")
        assert client.stats()["fingerprint"] == str(before)


def test_a_rank_killed_during_a_reload(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    a, b = folders
    with SidecarProcess(tmp_path, model=str(a), ranks="2") as sidecar, sidecar.connect() as client:
        before, of_a = client.fingerprint, encoded(client, "encoded")
        victim = client.stats()["ranks"]["pids"][0]
        with stopped(victim):
            reload = Reload(sidecar, b)
            under_way(sidecar, 1)
            os.kill(victim, signal.SIGKILL)
            reload.join()
        assert isinstance(reload.result, mmcache.SidecarError)
        assert "rank 0 died while it loaded it" in str(reload.result)
        eventually(lambda: client.stats()["ranks"]["ready"] == 2, "it is replaced")
        for lease, array in zip(client.encode(PICTURES), of_a, strict=True):
            with lease:
                assert lease.fingerprint == before
                np.testing.assert_allclose(lease.numpy(), array, rtol=1e-4, atol=1e-5)
        assert client.reload(b) != before
        of_b = encoded(client, "encoded")
        kill_ranks(client)
        assert_same(encoded(client, "encoded"), of_b)
        assert client.stats()["fingerprint"] == str(client.fingerprint)


def test_one_reload_at_a_time(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    """The second is refused; the first goes on although its client is gone."""
    a, b = folders
    with SidecarProcess(tmp_path, model=str(a)) as sidecar, sidecar.connect() as client:
        before = client.fingerprint
        code = "import sys, mmcache; mmcache.connect(sys.argv[1]).reload(sys.argv[2])"
        with stopped(client.stats()["ranks"]["pids"][0]):
            command = [sys.executable, "-c", code, str(sidecar.socket), str(b)]
            with subprocess.Popen(command, env=clean_environ()) as gone:
                under_way(sidecar, 1)
                with pytest.raises(mmcache.SidecarError, match="under way"):
                    client.reload(a)
                gone.kill()
        eventually(lambda: client.stats()["reloads"] == 1, "it ended without its client")
        assert client.fingerprint != before, "heard with the call for stats"


def test_a_reload_waits_for_a_rank(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    """The only rank is being restarted when new weights are asked for; a request waits too."""
    a, b = folders
    with SidecarProcess(tmp_path, model=str(a)) as sidecar, sidecar.connect() as client:
        before = client.fingerprint
        kill_ranks(client)
        assert client.reload(b) != before
        encoded(client, "encoded")


def test_a_late_answer_is_not_taken_for_anothers(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    a, b = folders
    with SidecarProcess(tmp_path, model=str(a)) as sidecar, sidecar.connect(timeout=2) as client:
        with stopped(client.stats()["ranks"]["pids"][0]), pytest.raises(mmcache.RequestTimeout):
            client.reload(b)
        eventually(lambda: client.stats()["reloads"] == 1, "the first goes on")
        with pytest.raises(mmcache.ConfigError):
            client.reload("no-such-model")
        assert client.stats()["model"] == str(b)


def test_the_command(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    a, b = folders

    def reload(*arguments: str, cwd: Path = tmp_path) -> subprocess.CompletedProcess[str]:
        command = [*MMCACHE, "reload", f"--socket={sidecar.socket}", *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=120, cwd=cwd, check=False,
            env=clean_environ(PYTHONPATH=str(Path(mmcache.__file__).parents[1])),
        )  # fmt: skip

    with SidecarProcess(tmp_path, model=str(a)) as sidecar:
        before = sidecar.stats()["fingerprint"]
        done = reload("--model", "b")
        after = sidecar.stats()["fingerprint"]
        assert done.stdout == f"new weights are served: fingerprint {after} (was {before})\n"
        assert (done.returncode, sidecar.stats()["model"]) == (0, str(b))
        done = reload()
        assert (done.returncode, done.stdout) == (0, f"the same weights as before: fingerprint {after}\n")
        done = reload("--model", "c")
        assert done.returncode == 2
        assert done.stderr.startswith(f"mmcache: model = {tmp_path}/c: ")
        (b / "model.safetensors").write_bytes(b"")
        done = reload()
        assert done.returncode == 1
        assert done.stderr.startswith(f"mmcache: model = {b}: ")
        assert sidecar.stats()["fingerprint"] == after
        assert reload("--model", "moonvit-tiny").returncode == 0
        assert sidecar.stats()["model"] == "moonvit-tiny"
