"""Sidecars for tests of the whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import mmcache
import mmcache.parts
from tests.mmcache.places import big, pixels, release
from tests.mmcache.support import SidecarProcess, eventually


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


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[SidecarProcess]:
    """A sidecar of the test's own, with one rank and small memory."""
    with SidecarProcess(tmp_path) as sidecar:
        yield sidecar


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
