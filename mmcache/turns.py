"""One connection's core, for one thread at a time: what is done with it, and how it ends.

The lock is held only while the core is touched, never while anybody waits.

A thread that is interrupted (Ctrl-C) while it moves bytes or touches the core, which takes microseconds, ends the
connection: nobody knows how far it came.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from mmcache.core import ClientCore
from mmcache.duplex import DuplexChannel
from mmcache.errors import ClientClosed, ConnectionLost

GOODBYE_S = 1.0

T = TypeVar("T")


class Turns:
    """A connection: its core and its socket.

    Attributes:
        lost: why the connection is gone, or None.
    """

    def __init__(self, core: ClientCore, channel: DuplexChannel, path: Path) -> None:
        self.core = core
        self.channel = channel
        self.lost: str | None = None
        self._path = path
        # Taken as itself, not through the condition: an exception of a signal handler cannot come in between then.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._owner = 0
        self._leader = 0
        self._num_followers = 0
        self._is_intact = True
        self._is_closed = False

    def turn(self, action: Callable[[ClientCore], T]) -> T:
        """Let `action` use the core for a short time; what it has to send is sent afterwards, as far as it goes.

        Raises:
            ClientClosed: the client is closed, or this thread is in the middle of a call.
            ConnectionLost: the sidecar went away.
        """
        self._check_thread()
        with self._lock:
            self.check()
            result = self._act(action)
            self._send()
            return result

    def do(self, action: Callable[[ClientCore], T]) -> T:
        """Let `action` use the core, whatever has become of the connection. Nothing is sent."""
        with self._lock:
            return self._act(action)

    def tell(self, action: Callable[[ClientCore], T]) -> T:
        """Let `action` end a wait or a call, whatever has become of the connection, and send what follows from it.

        Whoever waits looks again whether it is done.
        """
        with self._lock:
            result = self._act(action)
            if self.lost is None:
                with contextlib.suppress(ConnectionLost, ClientClosed):
                    self._send()
            self._changed.notify_all()
            if self._leader:
                self.channel.wake()
            return result

    def drop(self, action: Callable[[], None]) -> None:
        """Do this for an object that dies: now if nothing is under way, else at the end of what is. Never waits."""
        self.core.drop(action)
        if not self._lock.acquire(blocking=False):
            return  # whoever has the lock does it
        try:
            if self._owner or self.lost is not None:
                return
            if self._leader:
                self.channel.wake()
                return
            with contextlib.suppress(ConnectionLost, ClientClosed):
                self._act(lambda _: None)
                self._send()
        finally:
            self._lock.release()

    def close(self) -> None:
        """Acknowledge every lease but held ones, and end the connection; calls of other threads end. Twice is harmless.

        May come in the middle of this thread's own call, from a signal handler or a finalizer.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self.core.release_all()
            if self.lost is None:
                self._say_goodbye(time.monotonic() + GOODBYE_S)
                self._lose("the client was closed")
            self.retire()

    def abandon(self) -> None:
        """The client dies unclosed: say which leases go on, as far as that goes without waiting, and close it."""
        if not self.core.is_mine or not self._lock.acquire(blocking=False):
            return
        try:
            if self._owner or self._leader or self._is_closed:
                return
            self._is_closed = True
            if self.lost is None:
                self._say_goodbye(time.monotonic())
                self._lose("the client was dropped")
            self.channel.close()
        finally:
            self._lock.release()

    def retire(self) -> None:
        """The connection is over: close the socket once nobody waits on it. Leases go on."""
        with self._lock:
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

    def _check_thread(self) -> None:
        if threading.get_ident() in (self._owner, self._leader):
            raise ClientClosed("a call of this thread is under way; a signal handler may only close the client")

    def _act(self, action: Callable[[ClientCore], T]) -> T:
        """The caller has the lock."""
        before = self._owner
        try:
            self._owner, self._is_intact = threading.get_ident(), False
            result = action(self.core)
            self.core.tidy()
            self._is_intact = True
        except Exception:
            self._is_intact = True
            raise
        finally:
            self._owner = before
            if not self._is_intact:
                self._interrupted()
        return result

    def _wants_to_send(self) -> bool:
        return bool(self.core.outbox) or self.channel.is_sending

    def _send(self) -> None:
        """Hand what waits to the socket, as much as it takes now."""
        try:
            self.channel.send_some(self.core.outbox)
        except ConnectionLost as error:
            if self.lost is None:
                self._lose(str(error))
            self.check()
        except BaseException:
            if not self.channel.writes_whole:
                self._interrupted()
            raise

    def _interrupted(self) -> None:
        """What was read or said may be lost. The leases stay, and acknowledge without the socket."""
        self._is_intact = True
        if self.lost is None:
            if self.channel.writes_whole:
                self._say_goodbye(time.monotonic() + GOODBYE_S)
            self._lose("a call was interrupted")

    def _say_goodbye(self, deadline: float) -> None:
        """Tell which leases go on. If it fails, the coordinator learns the rest from this process's death."""
        self.core.say_goodbye()
        with contextlib.suppress(TimeoutError, ConnectionLost):
            self.channel.send_all(self.core.outbox, deadline)

    def _lose(self, reason: str) -> None:
        self.lost = reason
        self.channel.shut_down()
        while self.core.outbox:
            self.core.outbox.popleft().discard()
        self.core.forget_pools()
        self._changed.notify_all()
