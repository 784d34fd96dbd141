"""Moves the frames of one connection on an asyncio loop."""

from __future__ import annotations

import asyncio
import contextlib
import select
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mmcache.core import ClientCore
from mmcache.device_memory import is_on_device
from mmcache.duplex import DuplexChannel
from mmcache.errors import ClientClosed, ConnectionLost, ProtocolError, RequestTimeout
from mmcache.framing import OutgoingFrame
from mmcache.refs import StagedRef
from mmcache.supplying import Supplying, supply_now
from mmcache.turns import GOODBYE_S

T = TypeVar("T")
TURN_S = 1e-3
"""Frames are taken in for about this long before the loop's other work has its turn."""
INLINE_BYTES = 1 << 20
"""Reading and hashing more than this goes to a thread."""
ITEM_BYTES = 4 << 10
"""What an item costs besides its bytes, in bytes."""


class Watch:
    """Readiness of one socket.

    Through an epoll of its own, because libuv reports an error condition of a socket (a peer that closed with data
    unread) as a failure of the watch and stops it: the close would never be seen.
    """

    def __init__(self, fd: int, on_ready: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._fd = fd
        self._events = select.EPOLLIN
        self._epoll = select.epoll()
        self._epoll.register(fd, self._events)
        self._loop.add_reader(self._epoll.fileno(), on_ready)

    def watch(self, *, reads: bool, writes: bool) -> None:
        """Say what to wait for. Errors are always reported."""
        events = select.EPOLLIN * reads | select.EPOLLOUT * writes
        if events != self._events:
            self._events = events
            self._epoll.modify(self._fd, events)

    def close(self) -> None:
        """Stop, before the socket is closed. Twice is harmless."""
        if not self._epoll.closed:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()


class AsyncPump:
    """One connection: its core and its socket, on the loop that runs.

    Attributes:
        lost: why the connection is gone, or None.
    """

    def __init__(self, core: ClientCore, channel: DuplexChannel, path: Path) -> None:
        self.core = core
        self.lost: str | None = None
        self._channel = channel
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._last_words: deque[OutgoingFrame] = deque()
        self._waiting: dict[asyncio.Future[None], Callable[[], bool]] = {}
        self._threads: set[asyncio.Future[Any]] = set()
        self._watch = Watch(channel.fileno(), self._ready)
        self._loop.call_soon(self._ready)  # frames may have come with the greeting
        core.supply = self._supply

    @contextlib.contextmanager
    def turn(self) -> Iterator[ClientCore]:
        """The core, to send something; it goes at once, as far as the socket takes it.

        Raises:
            ClientClosed, ConnectionLost: it is over.
        """
        self.check()
        yield self.core
        self._send()

    def check(self) -> None:
        """Raise `ClientClosed` or `ConnectionLost` if no call can be made any more."""
        if self._is_closed:
            raise ClientClosed("the client is closed")
        if self.lost is not None:
            raise ConnectionLost(f"the sidecar at {self._path} went away: {self.lost}; connect again")

    def send_what_goes(self) -> None:
        """Send what waits, if the connection still stands."""
        if not self._is_closed:
            self._send()

    async def wait(self, is_done: Callable[[], bool], deadline: float, timeout_s: float) -> None:
        """Wait until `is_done`.

        Raises:
            RequestTimeout: the deadline, on the monotonic clock, passed.
            ConnectionLost, ClientClosed: meanwhile.
        """
        while not is_done():
            self.check()
            if time.monotonic() >= deadline:
                what = "took nothing" if self.core.outbox or self._channel.is_sending else "did not answer"
                raise RequestTimeout(f"{self._path} {what} within {timeout_s:g} s")
            await self._change(is_done, deadline)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread of the loop's executor. It goes on to its end when the caller is cancelled."""
        return await asyncio.shield(self.start_thread(work))

    def start_thread(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run `work` in a thread of the loop's executor; `close` waits for it."""
        outcome = self._loop.run_in_executor(None, work)
        self._threads.add(outcome)
        outcome.add_done_callback(self._threads.discard)
        return outcome

    async def close(self) -> None:
        """Acknowledge every lease but held ones, and end the connection; other tasks' calls end. Twice is harmless."""
        if self._is_closed:
            return
        self._is_closed = True
        self.core.release_all()
        try:
            if self.lost is None:
                await self._say_goodbye()
        finally:
            self.abandon("the client was closed")
        while self._threads:
            await asyncio.wait(self._threads)

    def abandon(self, reason: str) -> None:
        """End the connection at once. Leases go on. Twice is harmless."""
        if self.lost is not None:
            return
        self.lost = reason
        self._watch.close()
        self._channel.shut_down()
        self._channel.close()
        for frame in (*self.core.outbox, *self._last_words):
            frame.discard()
        self.core.outbox.clear()
        self._last_words.clear()
        self.core.forget_pools()
        self.core.supply = supply_now
        self._wake()

    def leave(self) -> None:
        """The client dies unclosed: say which leases go on, as far as that goes without waiting, and end it."""
        if self.lost is None and not self._is_closed:
            self.core.say_goodbye()
            self._send()
            self.abandon("the client was dropped")

    async def _say_goodbye(self) -> None:
        """Tell which leases go on. If it fails, the coordinator learns the rest from this process's death."""
        self.core.say_goodbye()
        self._last_words.extend(self.core.outbox)
        self.core.outbox.clear()  # what other tasks still say is not sent
        self._wake()
        self._send()
        deadline = time.monotonic() + GOODBYE_S
        while self.lost is None and not self._is_sent() and time.monotonic() < deadline:
            await self._change(self._is_sent, deadline)

    def _is_sent(self) -> bool:
        return not self._last_words and not self._channel.is_sending

    async def _change(self, is_done: Callable[[], bool], deadline: float) -> None:
        """Wait until it is done, the connection is over or the deadline passed."""
        change: asyncio.Future[None] = self._loop.create_future()
        timer = self._loop.call_later(max(0.0, deadline - time.monotonic()), _set, change)
        self._waiting[change] = is_done
        try:
            await change
        finally:
            timer.cancel()
            del self._waiting[change]

    def _wake(self) -> None:
        is_over = self._is_closed or self.lost is not None
        for change, is_done in self._waiting.items():
            if is_over or is_done():
                _set(change)

    def _ready(self) -> None:
        if self.lost is not None:
            return
        try:
            if not self._is_closed:
                self._receive()
            self._send()
        except (ConnectionLost, ProtocolError) as error:
            self.abandon(str(error))
        except BaseException:  # what was read may be lost with it
            self.abandon("a call was interrupted")
            raise
        self._wake()

    def _receive(self) -> None:
        until = time.monotonic() + TURN_S
        while (frame := self._channel.frame_there()) is not None:
            self.core.receive(frame)
            if time.monotonic() > until:
                self._loop.call_soon(self._ready)
                return

    def _send(self) -> None:
        if self.lost is not None:
            return
        try:
            is_sent = self._channel.send_some(self._last_words if self._is_closed else self.core.outbox)
        except ConnectionLost as error:
            self.abandon(str(error))
        else:
            self._watch.watch(reads=not self._is_closed, writes=not is_sent)

    def _supply(self, core: ClientCore, supplying: Supplying) -> None:
        if is_quick(supplying.items):
            supply_now(core, supplying)
        else:
            self.start_thread(supplying.prepare).add_done_callback(partial(self._prepared, supplying))

    def _prepared(self, supplying: Supplying, outcome: asyncio.Future[None]) -> None:
        if not outcome.cancelled() and (error := outcome.exception()) is not None:
            self.abandon(f"bytes to send could not be read: {error!r}")
        if self.lost is not None or self._is_closed:
            supplying.discard()
            return
        self.core.supplied(supplying)
        self._send()
        self._wake()


def is_quick(items: Sequence[object]) -> bool:
    """Whether reading and hashing items takes so little that the loop may do it."""
    nbytes = 0
    for item in items:
        if isinstance(item, bytes | bytearray):
            nbytes += len(item)
        elif item is not None and not isinstance(item, StagedRef):
            if is_on_device(item):  # copying waits for its stream
                return False
            size = getattr(item, "nbytes", None)  # paths have to be read, and pictures of Pillow decoded
            if not isinstance(size, int):
                return False
            nbytes += size
        nbytes += ITEM_BYTES
        if nbytes > INLINE_BYTES:
            return False
    return True


def _set(change: asyncio.Future[None]) -> None:
    if not change.done():
        change.set_result(None)
