"""Pools of real decoder processes without a sidecar around them, for tests."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from ipc.memory_shm import sealed_copy
from mmcache.keys import KeyHasher
from mmcache.media import IMAGE
from mmcache.server.channel import Poller
from mmcache.server.decode_job import Job
from mmcache.server.decoders import Decoders, Pixels, SharedDescriptor, Supplied
from mmcache.server.flows import Flow
from mmcache.server.ingest import Ingest
from tests.mmcache.support import is_alive

SEED = 7
PATIENCE_S = 60.0
"""Of tests, for a loaded machine."""

Array = np.ndarray[Any, Any]


class Pool:
    """Decoder processes and the region that they fill, as the coordinator has them."""

    def __init__(self, num_processes: int, timeout_s: float, ingest_bytes: int) -> None:
        self.ingest = Ingest(ingest_bytes)
        poller = Poller(asyncio.get_running_loop())
        self.decoders = Decoders(
            poller, self.ingest, SEED, 100_000_000, "exif", timeout_s, num_processes=num_processes
        )  # fmt: skip

    async def decode(
        self,
        data: bytes,
        claimed: bytes | None = None,
        flow: Hashable = None,
        kind: str = IMAGE,
        header: bytes = b"",
        **arguments: Any,
    ) -> Pixels:
        """The item's pixels, in the region. `claimed`: the bytes that it is said to have."""
        fd, _ = sealed_copy("test-file", [data])
        memory = SharedDescriptor(fd)
        try:
            key = KeyHasher(SEED).key(kind, header, data if claimed is None else claimed)
            supplied = Supplied(memory, "", kind, header, 0, len(data))
            return await self.decoders.decode(Job(supplied, key, Flow(flow), **arguments))
        finally:
            memory.release()

    async def array(self, data: bytes, **arguments: Any) -> Array:
        """A copy of the file's pixels, whose slice is freed."""
        pixels = await self.decode(data, **arguments)
        shape = (pixels.height, pixels.width, 3)
        copy = np.frombuffer(self.ingest.memory(pixels.part), np.uint8).reshape(shape).copy()
        self.ingest.free(pixels.part)
        return copy

    def begin(self, data: bytes, **arguments: Any) -> asyncio.Task[Array]:
        """`array` as a task."""
        return asyncio.get_running_loop().create_task(self.array(data, **arguments))

    def counter(self, name: str) -> Any:
        return self.decoders.counters()[name]

    async def until(self, is_true: Callable[[], bool], what: str) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE_S
        while not is_true():
            assert loop.time() < deadline, what
            await asyncio.sleep(0.005)

    async def settled(self) -> None:
        """Nothing is in hand, and nothing of it is left in the region."""
        await self.until(lambda: self.decoders.is_idle and self.ingest.bytes_used == 0, "all is over")
        self.ingest.check()


@asynccontextmanager
async def running(
    num_processes: int, timeout_s: float = PATIENCE_S, ingest_bytes: int = 64 << 20
) -> AsyncIterator[Pool]:
    """A pool that is up; in the end nothing is left in its region and no process of it lives."""
    pool = Pool(num_processes, timeout_s, ingest_bytes)
    try:
        await pool.decoders.start()
        assert len(pool.decoders.pids) == num_processes
        yield pool
        await pool.settled()
    finally:
        pids = pool.decoders.pids
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        await pool.decoders.stop(2.0)
        pool.ingest.close()
    assert not any(is_alive(pid) for pid in pids)


def stop(pid: int) -> None:
    """The process hangs until `go_on`."""
    os.kill(pid, signal.SIGSTOP)


def go_on(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)
