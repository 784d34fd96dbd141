"""Threads that share a client take turns."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from mmcache.errors import ClientClosed, RequestTimeout


class Turns:
    """One call at a time.

    Attributes:
        lock: held during a call; its own thread may take it again, because a signal handler or a finalizer may close
            the client in the middle of one.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._is_taken = False

    @contextlib.contextmanager
    def taken(self, timeout_s: float) -> Iterator[float]:
        """Wait for a turn; gives the deadline of the call, on the monotonic clock.

        Raises:
            RequestTimeout: other threads' calls took all of the time.
            ClientClosed: the thread is in a call already.
        """
        deadline = time.monotonic() + timeout_s
        if not self.lock.acquire(timeout=timeout_s):
            raise RequestTimeout(f"another thread's call took all of {timeout_s:g} s")
        try:
            if self._is_taken:
                raise ClientClosed("a call of this thread is under way; a signal handler may only close the client")
            self._is_taken = True
            try:
                yield deadline
            finally:
                self._is_taken = False
        finally:
            self.lock.release()
