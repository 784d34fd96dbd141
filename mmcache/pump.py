"""Moves the frames of one connection for any number of threads.

Whoever waits for an answer receives for all: one thread at a time leads, and the others are woken by what it hands in.
A thread that is interrupted while it waits (Ctrl-C) leaves the connection as it was.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from mmcache.core import ClientCore
from mmcache.errors import ClientClosed, ConnectionLost, ProtocolError, RequestTimeout
from mmcache.framing import close_all
from mmcache.turns import GOODBYE_S, Turns

T = TypeVar("T")


class Pump(Turns):
    """A connection whose threads wait for answers together."""

    def begin(self, start: Callable[[ClientCore], T], deadline: float, timeout_s: float) -> T:
        """Start a request or a question, as soon as the connection may have one more in flight. See `wait`."""
        while (started := self.turn(lambda core: None if core.is_full else (start(core),))) is None:
            self.wait(lambda: not self.core.is_full, deadline, timeout_s)
        return started[0]

    def wait(self, is_done: Callable[[], bool], deadline: float, timeout_s: float) -> None:
        """Send and receive until `is_done`.

        Raises:
            RequestTimeout: the deadline, on the monotonic clock, passed.
            ConnectionLost, ClientClosed: meanwhile.
        """
        self._check_thread()
        try:
            while not self._step(is_done, deadline):
                pass
        except TimeoutError:
            if self._wants_to_send():
                raise RequestTimeout(f"{self._path} took nothing within {timeout_s:g} s") from None
            raise RequestTimeout(f"no answer from {self._path} within {timeout_s:g} s") from None

    def poll(self) -> None:
        """Send and receive what goes without waiting."""
        self.check_process()
        if threading.get_ident() not in (self._owner, self._leader):
            with contextlib.suppress(TimeoutError):
                self._lead_if_free(lambda: False, 0.0)

    def is_gone(self) -> bool:
        """Whether the connection is over by now, as far as can be seen without waiting."""
        with contextlib.suppress(ConnectionLost, ProtocolError, ClientClosed):
            if self.channel.is_hung_up():  # also while another thread leads, who has not seen it yet
                self.wait(lambda: self.lost is not None, time.monotonic() + GOODBYE_S, GOODBYE_S)
        return self.lost is not None

    def _step(self, is_done: Callable[[], bool], deadline: float) -> bool:
        """Lead until it is done, or follow until the leader has handed something in."""
        with self._lock:
            if is_done():
                return True
            self.check()
            if self._leader:
                self._num_followers += 1
                try:
                    if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                        raise TimeoutError
                finally:
                    self._num_followers -= 1
                return False
        return self._lead_if_free(is_done, deadline)

    def _lead_if_free(self, is_done: Callable[[], bool], deadline: float) -> bool:
        """Lead until it is done; False at once if another thread leads, or the connection is over."""
        me = threading.get_ident()
        try:
            with self._lock:
                if self._leader or self.lost is not None:
                    return False
                self._leader = me
            with self._guarded():
                self._lead(is_done, deadline)
            return True
        finally:
            if self._leader == me:
                self._leader = 0
                self._stepped_down()

    def _lead(self, is_done: Callable[[], bool], deadline: float) -> None:
        lock, receive, tidy, next_frame = self._lock, self.core.receive, self.core.tidy, self.channel.next_frame
        while True:
            frame = next_frame(deadline, self._wants_to_send)
            with lock:
                if self.lost is not None and frame is not None:
                    close_all(frame.fds)
                    self.check()
                self._owner, self._is_intact = self._leader, False
                self.channel.reads_whole = True  # from here on it is this thread that may lose the frame
                try:
                    if frame is not None:
                        receive(frame)
                    tidy()
                    self._is_intact = True
                finally:
                    self._owner = 0
                if self._wants_to_send():
                    self._send()
                if self._num_followers:
                    self._changed.notify_all()
                if is_done():
                    return

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise
        except (ConnectionLost, ProtocolError) as error:
            with self._lock:
                self._is_intact = True
                if self.lost is None:
                    self._lose(str(error))
                self.check()
            raise
        except BaseException:
            with self._lock:
                if not self._is_intact or not self.channel.reads_whole:
                    self._interrupted()
            raise

    def _stepped_down(self) -> None:
        with self._lock:
            if self._num_followers or self._is_closed:
                self._changed.notify_all()
