"""Sidecars for tests of the whole."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

import mmcache
import mmcache.parts
from tests.mmcache.loops import Run
from tests.mmcache.places import big, pixels, release
from tests.mmcache.support import SidecarProcess, eventually
from tests.mmcache.weights import write_checkpoint


@pytest.fixture(scope="session")
def shared_sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    """One sidecar for all tests that neither kill nor fill it."""
    with SidecarProcess(tmp_path_factory.mktemp("shared"), ranks="2") as sidecar:
        yield sidecar
        assert sidecar.stats()["leases"]["active"] == 0, "a test leaked leases"


@pytest.fixture
def client(shared_sidecar: SidecarProcess) -> Iterator[mmcache.Client]:
    with shared_sidecar.connect() as client:
        yield client


class Standby:
    """Starts the next test's sidecar while a test runs: most of a start is importing torch."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._next: SidecarProcess | None = None

    def take(self) -> SidecarProcess:
        """One that is ready and that nobody has had."""
        sidecar, self._next = self._next or self._launched(), None
        sidecar.wait_ready()
        self._next = self._launched()
        return sidecar

    def end(self) -> None:
        if self._next is not None:
            self._next.wait_ready().stop()

    def _launched(self) -> SidecarProcess:
        sidecar = SidecarProcess(self._factory.mktemp("sidecar"))
        sidecar.launch()
        return sidecar


@pytest.fixture(scope="session")
def standby(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standby]:
    standby = Standby(tmp_path_factory)
    yield standby
    standby.end()


@pytest.fixture
def sidecar(standby: Standby) -> Iterator[SidecarProcess]:
    """A sidecar of the test's own, with one rank and small memory."""
    sidecar = standby.take()
    try:
        yield sidecar
    finally:
        if sidecar.process is not None and sidecar.process.poll() is None:
            sidecar.stop()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    """A sidecar whose pool has four places."""
    with SidecarProcess(tmp_path_factory.mktemp("full"), pool_bytes="1MiB") as sidecar:
        yield sidecar


@pytest.fixture
def full(small: SidecarProcess) -> Iterator[SidecarProcess]:
    """That sidecar, with nothing in its pool that a test asks for; nothing is left of the test in the end."""
    with small.connect() as client:
        release(client.encode(big(901, 902, 903, 904)))
        yield small
        eventually(lambda: client.stats()["leases"]["active"] == 0, "every lease ends")
        eventually(lambda: pixels(client) == 0, "no pixels linger")
        assert client.stats()["pool"]["bytes_leased"] == 0
        assert client.leases(check=True)["problems"] == []


@pytest.fixture
def one_item_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every item is a request of its own."""
    monkeypatch.setattr(mmcache.parts, "PART_BYTES", 1)


@pytest.fixture(scope="module")
def fresh() -> Iterator[int]:
    """Seeds of pictures that the sidecar has not seen."""
    return itertools.count(10_000)


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[Run]:
    """Runs a coroutine on a loop; afterwards nothing was logged, and no thread is left."""
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop
    before = set(threading.enumerate())

    def run_it(test: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(test)

    with caplog.at_level(logging.WARNING, "asyncio"):
        yield run_it
        gc.collect()
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []
    assert set(threading.enumerate()) == before


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Checkpoints of the same shape and other weights."""
    return write_checkpoint(tmp_path / "a", 1), write_checkpoint(tmp_path / "b", 2)
