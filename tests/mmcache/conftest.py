"""Sidecars for tests of the whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import mmcache
from tests.mmcache.support import SidecarProcess


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
