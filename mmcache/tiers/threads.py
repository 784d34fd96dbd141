"""For tiers that work in threads: memory that can be taken back, waiting that lets go, and a gate."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Landing:
    """A destination that its owner can take back from a thread that may still be writing to it."""

    into: memoryview
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: bool = False

    def write(self, offset: int, source: memoryview) -> bool:
        """Copy without the GIL. Returns False, writing nothing, once the landing is closed."""
        with self._lock:
            if self._closed:
                return False
            target = np.frombuffer(self.into, np.uint8)[offset : offset + source.nbytes]
            np.copyto(target, np.frombuffer(source, np.uint8))
            return True

    def close(self) -> None:
        """Take it back: waits for the write in progress, if any, and lets no other begin."""
        with self._lock:
            self._closed = True


async def settled(future: asyncio.Future[T]) -> T:
    """The result of work in a thread; a cancellation takes effect only once the thread has let go of its arguments."""
    cancelled = False
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    return future.result()


class Gate:
    """Many threads share it, or one has it alone."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._num_shared = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Beside others that share it."""
        with self._condition:
            self._num_shared += 1
        try:
            yield
        finally:
            with self._condition:
                self._num_shared -= 1
                self._condition.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Alone; waits for those that share it. A thread that shares it already would wait for ever."""
        with self._condition:
            self._condition.wait_for(lambda: self._num_shared == 0)
            yield
