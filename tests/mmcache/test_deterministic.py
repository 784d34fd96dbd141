"""`deterministic` through whole sidecars: the same bits on one rank and on three, encoded, from pool and from store."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from encoder.model import Encoder
from encoder.sizing import grid_thw, num_tokens
from tests.mmcache.support import SidecarProcess, eventually, image

ITEMS = [image(seed, *size) for seed, size in enumerate([(28, 28), (1, 1), (56, 84), (200, 224), (90, 30), (140, 196)])]


@pytest.fixture(scope="module")
def alone() -> Iterator[list[np.ndarray[Any, Any]]]:
    """Each item by itself, in this process, on as many threads as it happens to have."""
    before = torch.get_num_threads()
    encoder = Encoder.load("moonvit-tiny", deterministic=True)
    embeddings = []
    for item in ITEMS:
        grid = grid_thw(item.shape[1], item.shape[0], encoder.processor)
        out = torch.empty(num_tokens(grid, 2), encoder.config.text_width)
        assert encoder.encode([item], [out]) == [True]
        embeddings.append(out.numpy())
    yield embeddings
    torch.set_num_threads(before)


@pytest.mark.parametrize("ranks", ["1", "3"])
def test_the_same_bits_from_any_rank_in_any_order_from_every_tier(
    tmp_path: Path, ranks: str, alone: list[np.ndarray[Any, Any]]
) -> None:
    store = {"store": f"file://{tmp_path}/store.lmdb", "store_bytes": "64MiB"}
    sidecar = SidecarProcess(tmp_path, ranks=ranks, deterministic="true", **store)
    draw = random.Random(int(ranks))

    def check(origin: str, namespace: str) -> None:
        order = draw.sample(range(len(ITEMS)), len(ITEMS))
        with sidecar.connect(namespace=namespace) as client:
            leases = client.encode([ITEMS[index] for index in order])
            for index, lease in zip(order, leases, strict=True):
                assert lease.origin == origin
                assert lease.numpy().tobytes() == alone[index].tobytes()
                lease.release()

    namespaces = [f"pack {number}" for number in range(4)]
    with sidecar:
        for namespace in namespaces:  # a namespace of its own has every item encoded once more
            check("encoded", namespace)
            check("pool", namespace)
        eventually(lambda: sidecar.stats()["store"]["written"] == 4 * len(ITEMS), "all is stored")
    with sidecar:
        for namespace in namespaces:
            check("store", namespace)
            check("pool", namespace)


def test_it_has_a_fingerprint_of_its_own(tmp_path: Path) -> None:
    fingerprints = set()
    for flag in ("false", "true"):
        with SidecarProcess(tmp_path, deterministic=flag) as sidecar, sidecar.connect() as client:
            fingerprints.add(client.fingerprint)
    assert len(fingerprints) == 2
