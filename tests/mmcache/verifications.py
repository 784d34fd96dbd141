"""Sidecars that verify every hit, and what tests of that look at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import mmcache
from tests.mmcache.support import SidecarProcess, image


def verifying(folder: Path, **settings: str) -> SidecarProcess:
    chosen = {"verify_sample": "1", "store": f"file://{folder}/store.lmdb", "store_bytes": "64MiB"} | settings
    return SidecarProcess(folder, **chosen)


def counts(sidecar: SidecarProcess) -> dict[str, int]:
    return dict(sidecar.stats()["verify"])


def is_at_rest(sidecar: SidecarProcess) -> bool:
    """Everything sampled has its outcome, and nothing is held for it."""
    stats = sidecar.stats()
    outcomes = sum(stats["verify"][name] for name in ("matched", "mismatched", "dropped"))
    return bool(stats["verify"]["sampled"] == outcomes and stats["ingest"]["bytes_used"] == 0)


def encode(client: mmcache.Client, seed: int) -> tuple[str, np.ndarray[Any, Any]]:
    with client.encode([image(seed)])[0] as lease:
        return lease.origin, lease.numpy().copy()
