"""A pool as the coordinator holds it: the descriptor of its memory, and the books over it."""

from __future__ import annotations

import os
from collections.abc import Callable

from ipc.memory_shm import SEALS_READERS, ReadOnlyRegion
from ipc.pool import Extent, Pool


class PoolMemory:
    """The memory of one rank, which may outlive that rank. The coordinator has no context on any device.

    Host memory loses its only writer with its rank, and is given back when nobody reads it any more. Device memory is
    kept by its descriptor alone: the rank's successor maps it again.

    Attributes:
        pool_id: names it to clients.
        fd: the descriptor that readers and the successor of its rank are handed.
        nbytes: size of the memory.
        device: UUID of the device it is on; empty for host memory.
        pool: its extents.
    """

    def __init__(self, pool_id: int, fd: int, nbytes: int, device: str, on_evict: Callable[[Extent], None]) -> None:
        """Takes ownership of `fd`. `nbytes` is only believed of device memory."""
        self.pool_id = pool_id
        self.fd = fd
        self.device = device
        self._mapping = None if device else ReadOnlyRegion.attach(fd, SEALS_READERS)
        self.nbytes = nbytes if self._mapping is None else self._mapping.nbytes
        self.pool = Pool(pool_id, self.nbytes, on_evict=on_evict)

    @property
    def outlives_its_rank(self) -> bool:
        """Whether another process can write it after its rank's death."""
        return bool(self.device)

    def lose_writer(self) -> None:
        """Its rank is dead. What was being written is dropped; what is cached stays if a successor can go on."""
        if self.outlives_its_rank:
            self.pool.lose_writer()
        else:
            self.pool.retire()

    def payload(self, extent: Extent) -> memoryview | None:
        """The extent's bytes, read only; None of device memory. The caller keeps the extent pinned meanwhile."""
        return None if self._mapping is None else self._mapping.view(extent.offset, extent.nbytes).data

    def close(self) -> None:
        """Nobody reads it any more. Twice is harmless."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._mapping = None
