"""Data memory for a process that hands it on and never looks at its bytes: a descriptor, and no mapping.

Mapping a large memory, and unmapping it, takes long and holds the interpreter lock; this does neither.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Iterable
from typing import Self

from ipc.memory_shm import SEALS_RESIZE, add_seals, allocated_memfd, round_up

PUNCH_HOLE = 0x02 | 0x01  # linux/falloc.h: FALLOC_FL_PUNCH_HOLE, which needs FALLOC_FL_KEEP_SIZE


class UnmappedMemory:
    """A memfd of fixed size whose pages are all there. It owns its descriptor; `close()` returns it.

    Every method may take as long as the memory is large, lets other threads run meanwhile, and may be called in any
    thread.

    Attributes:
        fd: to be passed on; valid until `close()`.
        nbytes: size in bytes, a multiple of the page.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        """Use `create`. Takes ownership of `fd`."""
        self.fd = fd
        self.nbytes = nbytes
        self._lock = threading.Lock()
        self._close_fd = weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, name: str, nbytes: int) -> Self:
        """Make a memfd of at least `nbytes` bytes (rounded up to the page), and fix its size for good.

        Raises `MemoryUnavailable` if the system lacks the memory; nothing of it is kept then.
        """
        memory = cls(*allocated_memfd(name, nbytes))
        add_seals(memory.fd, SEALS_RESIZE)
        return memory

    def give_back(self, runs: Iterable[tuple[int, int]]) -> int:
        """Return the whole pages within these runs (offset and bytes) to the system, whoever has them mapped.

        They read as zeros from then on; who writes to one gets a new page. Returns the bytes that were given back:
        none after `close()`, or where the system refuses.
        """
        with self._lock:
            if not self._close_fd.alive:
                return 0
            return sum(
                nbytes for offset, nbytes in map(_whole_pages, runs) if nbytes and _punch(self.fd, offset, nbytes)
            )

    def close(self) -> None:
        """Close the descriptor: the memory is free when nobody else has it. Twice is harmless."""
        with self._lock:
            self._close_fd()


def _whole_pages(run: tuple[int, int]) -> tuple[int, int]:
    offset, nbytes = run
    start, end = round_up(offset, mmap.PAGESIZE), (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    return start, max(0, end - start)


def _punch(fd: int, offset: int, nbytes: int) -> bool:
    result: int = ctypes.CDLL(None).fallocate(fd, PUNCH_HOLE, ctypes.c_int64(offset), ctypes.c_int64(nbytes))
    return result == 0
