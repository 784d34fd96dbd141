"""Moves the frames of one connection for any number of threads.

Whoever waits for an answer receives for all: one thread at a time leads, and the others are woken by what it hands in.
The lock is held only while the core is touched, never while anybody waits.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from mmcache.core import ClientCore
from mmcache.errors import ClientClosed, ConnectionLost, ProtocolError, RequestTimeout
from mmcache.transport import DuplexChannel

GOODBYE_S = 1.0


class Pump:
    """One connection: its core and its socket.

    Attributes:
        lost: why the connection is gone, or None.
        lock: held while the core is touched.
    """

    def __init__(self, core: ClientCore, channel: DuplexChannel, path: Path) -> None:
        self.core = core
        self.channel = channel
        self.lost: str | None = None
        self._path = path
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._owner = 0
        self._leader = 0
        self._num_followers = 0
        self._is_closed = False

    @contextlib.contextmanager
    def turn(self) -> Iterator[ClientCore]:
        """The core, for one thread and a short time; what it has to send is sent afterwards, as far as it goes.

        Raises:
            ClientClosed: the client is closed, or this thread is in the middle of a call.
            ConnectionLost: the sidecar went away.
        """
        me = threading.get_ident()
        if me in (self._owner, self._leader):
            raise ClientClosed("a call of this thread is under way; a signal handler may only close the client")
        with self._changed:
            self.check()
            self._owner = me
            try:
                yield self.core
                self._send()
            finally:
                self._owner = 0

    def wait(self, is_done: Callable[[], bool], deadline: float, timeout_s: float) -> None:
        """Send and receive until `is_done`.

        Raises:
            RequestTimeout: the deadline, on the monotonic clock, passed.
            ConnectionLost, ClientClosed: meanwhile.
        """
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
        me = threading.get_ident()
        with self._changed:
            if self._leader or self._owner == me or self.lost is not None:
                return
            self._leader = me
        try:
            with self._guarded(), contextlib.suppress(TimeoutError):
                self._lead(lambda: False, 0.0)
        finally:
            self._step_down()

    def is_gone(self) -> bool:
        """Whether the connection is over by now, as far as can be seen without waiting."""
        with contextlib.suppress(ConnectionLost, ProtocolError, ClientClosed):
            self.poll()
        return self.lost is not None

    def send_what_goes(self) -> None:
        """Send what waits, if the connection still stands. The caller has the lock."""
        if self.lost is None:
            with contextlib.suppress(ConnectionLost):
                self._send()

    def close(self) -> None:
        """Acknowledge every lease but held ones, and end the connection; calls of other threads end. Twice is harmless.

        May come in the middle of this thread's own call, from a signal handler or a finalizer.
        """
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self.core.release_all()
            if self.lost is None:
                self._say_goodbye()
                self._lose("the client was closed")
            self.retire()

    def retire(self) -> None:
        """The connection is over: close the socket once nobody waits on it. Leases go on."""
        with self._changed:
            if self._leader not in (0, threading.get_ident()):
                self._changed.wait_for(lambda: not self._leader, timeout=GOODBYE_S)
            self.channel.close()

    def check_process(self) -> None:
        """Raise `ClientClosed` in a forked child: answers that it took would be missing in its parent."""
        if not self.core.is_mine:
            raise ClientClosed("this client belongs to the process that opened it; connect anew after a fork")

    def check(self) -> None:
        """Raise `ClientClosed` or `ConnectionLost` if no call can be made any more, or not by this process."""
        self.check_process()
        if self._is_closed:
            raise ClientClosed("the client is closed")
        if self.lost is not None:
            raise ConnectionLost(f"the sidecar at {self._path} went away: {self.lost}; connect again")

    def _step(self, is_done: Callable[[], bool], deadline: float) -> bool:
        """Lead until it is done, or follow until the leader has handed something in."""
        me = threading.get_ident()
        with self._changed:
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
            self._leader = me
        try:
            with self._guarded():
                self._lead(is_done, deadline)
        finally:
            self._step_down()
        return True

    def _lead(self, is_done: Callable[[], bool], deadline: float) -> None:
        channel, receive, changed = self.channel, self.core.receive, self._changed
        while True:
            frame = channel.next_frame(deadline, self._wants_to_send)
            with changed:
                if frame is not None:
                    receive(frame)
                if self._wants_to_send():
                    self._send()
                if self._num_followers:
                    changed.notify_all()
                if is_done():
                    return

    def _wants_to_send(self) -> bool:
        return bool(self.core.outbox) or self.channel.is_sending

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise
        except (ConnectionLost, ProtocolError) as error:
            with self._changed:
                if self.lost is None:
                    self._lose(str(error))
                self.check()
            raise
        except BaseException:
            # What was read may be lost with the interruption. The leases stay, and acknowledge without the socket.
            with self._changed:
                if self.lost is None:
                    self._say_goodbye()
                    self._lose("a call was interrupted")
            raise

    def _step_down(self) -> None:
        with self._changed:
            self._leader = 0
            if self._num_followers or self._is_closed:
                self._changed.notify_all()

    def _send(self) -> None:
        """Hand what waits to the socket, as much as it takes now."""
        try:
            self.channel.send_some(self.core.outbox)
        except ConnectionLost as error:
            if self.lost is None:
                self._lose(str(error))
            self.check()

    def _say_goodbye(self) -> None:
        """Tell which leases go on. If it fails, the coordinator learns the rest from this process's death."""
        self.core.say_goodbye()
        deadline = time.monotonic() + GOODBYE_S
        with contextlib.suppress(TimeoutError, ConnectionLost):
            self.channel.send_all(self.core.outbox, deadline)

    def _lose(self, reason: str) -> None:
        self.lost = reason
        self.channel.shut_down()
        for frame in self.core.outbox:
            frame.discard()
        self.core.outbox.clear()
        self.core.forget_pools()
        self._changed.notify_all()
