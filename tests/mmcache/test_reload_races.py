"""What is under way when the model changes: queued, waiting for room, read from the store."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmcache
from ipc.pool import Extent, Pool
from mmcache.server.batcher import Batcher, RankLostError, RecalledError
from mmcache.server.decoders import Pixels
from mmcache.server.ingest import IngestSlice
from mmcache.server.messages import Ran, Run
from mmcache.server.microbatch import EncodeJob
from tests.mmcache.support import SidecarProcess, eventually, image
from tests.mmcache.weights import CONFIG, write_checkpoint

ROOMY = dataclasses.replace(CONFIG, text_width=256)
"""A kilobyte a token: the smallest pool has room for 1,024 of them."""
BIG = image(50, 28 * 31, 28 * 32)
"""All of the pool but 32 tokens."""
SMALL = image(51, 28 * 8, 28 * 8)
"""64 tokens."""


class Encode(threading.Thread):
    """A request of a client of its own. `found`: (fingerprint, origin, array) of each item."""

    def __init__(self, sidecar: SidecarProcess, pictures: list[Any]) -> None:
        super().__init__()
        self._sidecar, self._pictures = sidecar, pictures
        self.found: list[tuple[mmcache.Fingerprint, str, Any]] = []
        self.start()

    def run(self) -> None:
        with self._sidecar.connect() as client:
            for lease in client.encode(self._pictures):
                with lease:
                    self.found.append((lease.fingerprint, lease.origin, lease.numpy().copy()))


def alone(client: mmcache.Client, picture: Any) -> Any:
    with client.encode([picture])[0] as lease:
        return lease.numpy().copy()


@pytest.mark.parametrize("width", [256, 512])
@pytest.mark.parametrize("has_store", [False, True])
def test_a_model_changes_while_a_flight_waits_for_room(tmp_path: Path, has_store: bool, width: int) -> None:
    """What has its place or its store entry by the old model's measure is placed, found and encoded anew."""
    a = write_checkpoint(tmp_path / "a", 1, ROOMY)
    b = write_checkpoint(tmp_path / "b", 2, dataclasses.replace(ROOMY, text_width=width))
    store = f"file://{tmp_path}/store.lmdb" if has_store else "none"
    with SidecarProcess(tmp_path, model=str(a), pool_bytes="1MiB", store=store) as sidecar:
        with sidecar.connect() as client:
            of_a = alone(client, SMALL)
            eventually(lambda: client.stats()["store"]["queued"] == 0, "it is stored, if there is a store")
            (big,) = client.encode([BIG])
            expected_big = big.numpy().copy()
            waiting = Encode(sidecar, [SMALL])
            eventually(lambda: client.stats()["pool"]["room_waits"] > 0, "the leased picture leaves no room")
            second = client.reload(b)
            assert waiting.is_alive()
            np.testing.assert_array_equal(big.numpy(), expected_big)
            big.release()
            waiting.join()
            ((fingerprint, origin, array),) = waiting.found
            assert (fingerprint, origin, array.shape) == (second, "encoded", (64, width))
            np.testing.assert_array_equal(array, alone(client, SMALL))
            assert width != of_a.shape[1] or not np.array_equal(array, of_a)
        stats = sidecar.stats()
        assert (stats["errors"], stats["items"]["hit_store"]) == ({}, 0)


def test_a_model_of_another_width_changes_under_a_long_queue(tmp_path: Path) -> None:
    """Every batch is one item. What was encoded before, and is leased beside what is written now, stays as it was."""
    a = write_checkpoint(tmp_path / "a", 1)
    b = write_checkpoint(tmp_path / "b", 2, dataclasses.replace(CONFIG, text_width=96))
    pictures = [image(seed, 28 * 18, 28 * 20) for seed in range(60)]
    with SidecarProcess(tmp_path, model=str(a), max_batch_patches="4") as sidecar, sidecar.connect() as client:
        first = client.fingerprint
        held = client.encode(pictures[:2])
        expected = [lease.numpy().copy() for lease in held]
        work = Encode(sidecar, pictures)
        eventually(lambda: client.stats()["encode"]["queued"] > 30, "the queue is long")
        second = client.reload(b)
        work.join()
        for lease, array in zip(held, expected, strict=True):
            np.testing.assert_array_equal(lease.numpy(), array)
            lease.release()
        found = {fingerprint for fingerprint, _, _ in work.found}
        assert second in found, "the model changed while requests were queued"
        for picture, (fingerprint, _, array) in zip(pictures, work.found, strict=True):
            assert fingerprint in (first, second)
            if fingerprint == second:
                np.testing.assert_allclose(array, alone(client, picture), rtol=1e-4, atol=1e-5)
        stats = client.stats()
        assert stats["errors"] == {}
        assert stats["encode"]["batches"] == stats["items"]["encoded"], "what was queued for the old model never ran"


def test_the_sidecar_stops_during_a_reload(tmp_path: Path) -> None:
    a, b = write_checkpoint(tmp_path / "a", 1), write_checkpoint(tmp_path / "b", 2)
    with SidecarProcess(tmp_path, model=str(a)) as sidecar:
        client = sidecar.connect()
        os.kill(client.stats()["ranks"]["pids"][0], signal.SIGSTOP)
        lost: list[Exception] = []

        def reload() -> None:
            try:
                client.reload(b)
            except mmcache.ConnectionLost as error:
                lost.append(error)

        work = threading.Thread(target=reload)
        work.start()
        eventually(lambda: "reload: loading" in sidecar.log(), "the reload has begun")
        assert sidecar.stop() == 0
        work.join()
        assert len(lost) == 1
        assert "Traceback" not in sidecar.log()
        assert "never retrieved" not in sidecar.log()


def job(extent: Extent) -> EncodeJob:
    return EncodeJob(Pixels(IngestSlice(0, 12), 1, 2, 2), 4, 1, 64, 1.0, extent=extent)


def in_loop(test: Callable[[Batcher, list[Run], list[EncodeJob]], Any]) -> None:
    """Run a test with a batcher of one item a batch, what it sends, and three jobs."""

    async def run() -> None:
        sent: list[Run] = []
        pool = Pool(1, 4096, on_evict=lambda _: None)
        jobs = [job(extent) for _ in range(3) if (extent := pool.reserve(64))]
        await test(Batcher(sent.append, 4), sent, jobs)

    asyncio.run(run())


def test_a_paused_batcher_ends_its_batch_and_begins_none() -> None:
    async def test(batcher: Batcher, sent: list[Run], jobs: list[EncodeJob]) -> None:
        for each in jobs[:2]:
            batcher.submit(each)
        pausing = asyncio.ensure_future(batcher.pause())
        await asyncio.sleep(0)
        assert not pausing.done(), "a batch is in flight"
        batcher.submit(jobs[2])
        batcher.ran(Ran(batch_id=1, seconds=0.5, finite=[True]))
        await pausing
        assert (await jobs[0].done, len(sent), len(batcher)) == (0.5, 1, 2)
        batcher.resume()
        assert len(sent) == 2
        batcher.ran(Ran(batch_id=2, seconds=0.5, finite=[True]))
        assert len(sent) == 3

    in_loop(test)


def test_an_idle_batcher_pauses_at_once() -> None:
    async def test(batcher: Batcher, sent: list[Run], jobs: list[EncodeJob]) -> None:
        await batcher.pause()
        batcher.submit(jobs[0])
        assert sent == []
        batcher.recall()
        batcher.resume()
        with pytest.raises(RecalledError):
            await jobs[0].done
        assert (sent, len(batcher), batcher.queued_s) == ([], 0, 0.0)

    in_loop(test)


def test_a_rank_that_dies_ends_the_pause() -> None:
    async def test(batcher: Batcher, sent: list[Run], jobs: list[EncodeJob]) -> None:
        batcher.submit(jobs[0])
        pausing = asyncio.ensure_future(batcher.pause())
        await asyncio.sleep(0)
        batcher.lose()
        await pausing
        with pytest.raises(RankLostError):
            await jobs[0].done

    in_loop(test)
