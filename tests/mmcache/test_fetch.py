"""Copies of embeddings for who cannot map them."""

from __future__ import annotations

import asyncio
import gc
import os

import numpy as np
import pytest

import mmcache
from tests.mmcache.support import SidecarProcess, eventually, image


def test_a_copy_is_equal_and_its_own(client: mmcache.Client) -> None:
    before, counted = client.stats()["items"]["fetched"], client.device_counters["fetched"]
    (lease,) = client.encode([image(71)])
    copy = client.fetch(lease)
    assert copy.shape == (lease.num_tokens, lease.dim)
    np.testing.assert_array_equal(copy.numpy(), lease.numpy())
    assert not lease.is_released
    lease.release()
    copy.zero_()  # nobody else's memory
    (again,) = client.encode([image(71)])
    assert again.origin == "pool"
    assert np.any(again.numpy())
    again.release()
    assert client.stats()["items"]["fetched"] == before + 1
    assert client.device_counters == {
        "stream_writes": 0, "fallbacks": 0, "fetched": counted + 1, "unlocked_bytes": 0
    }  # fmt: skip


def test_asyncio(shared_sidecar: SidecarProcess) -> None:
    async def fetch() -> None:
        async with await mmcache.AsyncClient.connect(shared_sidecar.socket) as client:
            with (await client.encode([image(72)]))[0] as lease:
                np.testing.assert_array_equal((await client.fetch(lease)).numpy(), lease.numpy())

    asyncio.run(fetch())


def test_what_has_no_lease_is_not_copied(client: mmcache.Client, shared_sidecar: SidecarProcess) -> None:
    (lease,) = client.encode([image(73)])
    with shared_sidecar.connect() as other, pytest.raises(ValueError, match="of another client"):
        other.fetch(lease)
    lease.release()
    with pytest.raises(mmcache.LeaseReleased):
        client.fetch(lease)


def test_a_lease_that_ended_on_its_way(client: mmcache.Client) -> None:
    """What another thread released in between is not copied: its bytes may be another's by then."""
    (lease,) = client.encode([image(74)])
    slot, generation = lease.word(client._core)
    client._core.control.acknowledge(slot, generation)
    client.stats()  # sweeps
    with pytest.raises(mmcache.LeaseReleased, match="has ended"):
        client.fetch(lease)
    lease.release()


def test_nothing_is_left_of_it(client: mmcache.Client) -> None:
    (lease,) = client.encode([image(75)])
    client.fetch(lease)
    gc.collect()  # what earlier tests left
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        client.fetch(lease)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    lease.release()


def test_from_the_pool_of_a_dead_rank(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as client:
        (lease,) = client.encode([image(1)])
        expected = lease.numpy().copy()
        (pid,) = client.stats()["ranks"]["pids"]
        os.kill(pid, 9)
        eventually(lambda: client.stats()["ranks"]["ready"] == 0, "the rank is dead")
        np.testing.assert_array_equal(client.fetch(lease).numpy(), expected)
        lease.release()
