"""Frames over a Unix socket on the event loop. asyncio's streams drop descriptors, so this calls recvmsg itself."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable

from mmcache.errors import ProtocolError
from mmcache.framing import Frame, FrameReader, OutgoingFrame, joined
from mmcache.transport import receive_once, rights

log = logging.getLogger(__name__)

MAX_PENDING_BYTES = 16 << 20
"""A peer that does not read is cut off when this much waits for it."""


FRAMES_A_TURN = 16
BUSY_S = 300e-6
"""While a client's frames follow each other this closely, the loop polls: waking up would take as long as an answer."""
MORE_S = 2e-3
"""Longest that the loop polls for the next part of a call: its client reads and hashes it meanwhile."""


class Poller:
    """Readiness of many sockets through one descriptor of the loop.

    An epoll of our own, because libuv reports an error condition of a socket (a peer that closed with data unread) as a
    failure of the watch and stops it: the close would never be seen.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, may_spin: bool = True) -> None:
        """`may_spin`: whether it polls for a moment when more is expected, instead of sleeping."""
        self._loop = loop
        self._may_spin = may_spin
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._hurried: set[int] = set()
        self._hurried_at = 0.0
        self._poll_until = 0.0
        self._is_polling = False
        loop.add_reader(self._epoll.fileno(), self._ready)

    def register(self, fd: int, on_events: Callable[[int], None], *, is_hurried: bool = False) -> None:
        """Call `on_events` with the epoll bits whenever `fd` is readable or broken.

        `is_hurried`: somebody waits for what is done about it, and it often comes again at once.
        """
        self._handlers[fd] = on_events
        if is_hurried:
            self._hurried.add(fd)
        self._epoll.register(fd, select.EPOLLIN)

    def want_write(self, fd: int, wanted: bool) -> None:
        """Report when `fd` is writable, or no longer."""
        self._epoll.modify(fd, select.EPOLLIN | select.EPOLLOUT if wanted else select.EPOLLIN)

    def unregister(self, fd: int) -> None:
        """Forget `fd`, before it is closed."""
        self._epoll.unregister(fd)
        self._hurried.discard(fd)
        del self._handlers[fd]

    def expect_more(self) -> None:
        """The frame that is being handled is one of several of a call."""
        self._hurried_at = time.monotonic()
        self._poll_for(MORE_S)

    def _ready(self) -> None:
        is_hurried = False
        for fd, events in self._epoll.poll(0):
            is_hurried |= fd in self._hurried
            # One handler may have closed another's socket, and a new socket may have its number: it finds nothing.
            handler = self._handlers.get(fd)
            if handler is not None:
                handler(events)
        if is_hurried:
            before, self._hurried_at = self._hurried_at, time.monotonic()
            if self._hurried_at - before < BUSY_S:
                self._poll_for(BUSY_S)

    def _poll_for(self, seconds: float) -> None:
        self._poll_until = max(self._poll_until, self._hurried_at + seconds)
        if not self._is_polling and self._may_spin:
            self._is_polling = True
            self._loop.call_soon(self._poll)

    def _poll(self) -> None:
        """One look a turn of the loop, which goes on as ever."""
        if time.monotonic() > self._poll_until:
            self._is_polling = False
            return
        os.sched_yield()
        self._ready()
        self._loop.call_soon(self._poll)


class Channel:
    """One connected socket: `on_frame` gets every frame, `on_close` is called once, with the reason.

    A `ProtocolError` raised by `on_frame` closes the channel. The channel owns the socket.

    `gathers`: frames go out together at the loop's next turn. Sending to a process that sleeps costs as much as all
    else that is done about an item.
    """

    def __init__(
        self,
        poller: Poller,
        sock: socket.socket,
        on_frame: Callable[[Frame], None],
        on_close: Callable[[str], None],
        *,
        is_hurried: bool = False,
        gathers: bool = False,
    ) -> None:
        sock.setblocking(False)
        self._poller = poller
        self._sock = sock
        self._on_frame = on_frame
        self._on_close = on_close
        self._reader = FrameReader()
        self._pending: deque[OutgoingFrame] = deque()
        self._pending_bytes = 0
        self._is_behind = False
        self._gathers = gathers
        self._is_gathering = False
        self._wants_write = False
        self.is_open = True
        poller.register(sock.fileno(), self._on_events, is_hurried=is_hurried)

    def send(self, frame: OutgoingFrame) -> None:
        """Send now what the socket takes and the rest when it can. On a closed channel the frame is dropped."""
        if not self.is_open:
            frame.discard()
            return
        if not self._gathers and not self._pending and self._write(frame):
            return
        if frame.fds and not frame.owned:
            frame.fds, frame.owned = [os.dup(fd) for fd in frame.fds], True
        self._pending.append(frame)
        self._pending_bytes += len(frame.data)
        if self._pending_bytes > MAX_PENDING_BYTES:
            self._close_soon("the peer does not read")
        elif self._gathers and not self._wants_write:
            if not self._is_gathering:
                self._is_gathering = True
                asyncio.get_running_loop().call_soon(self._gather)
        elif self.is_open:
            self._want_write(True)

    def close(self, reason: str = "closed") -> None:
        """Close the socket and everything that was pending. Doing so twice is harmless."""
        if not self.is_open:
            return
        self.is_open = False
        self._poller.unregister(self._sock.fileno())
        self._sock.close()
        self._reader.close()
        for frame in self._pending:
            frame.discard()
        self._pending.clear()
        on_close, self._on_close, self._on_frame = self._on_close, _ignore, _ignore  # whose they are may die now
        on_close(reason)

    def _on_events(self, events: int) -> None:
        if events & select.EPOLLOUT:
            self._writable()
        if self.is_open and events & ~select.EPOLLOUT:
            self._readable()

    def _readable(self) -> None:
        if self._is_behind:
            return
        try:
            alive = receive_once(self._sock, self._reader)
            self._handle_frames()
        except (BlockingIOError, InterruptedError):
            return
        except ProtocolError as error:
            self._reject(error)
        except OSError as error:
            self.close(f"the connection broke: {error.strerror}")
        else:
            if not alive:
                self.close("the other end closed the connection")

    def _handle_frames(self) -> None:
        """Handle what has come, a few frames at a turn of the loop, so that one peer cannot keep it to itself."""
        for _ in range(FRAMES_A_TURN):
            if not self.is_open or (frame := self._reader.next_frame()) is None:
                return
            self._on_frame(frame)
        self._is_behind = True
        asyncio.get_running_loop().call_soon(self._catch_up)

    def _catch_up(self) -> None:
        self._is_behind = False
        if self.is_open:
            try:
                self._handle_frames()
            except ProtocolError as error:
                self._reject(error)

    def _reject(self, error: ProtocolError) -> None:
        log.warning("closing a connection: %s", error)
        self.close(str(error))

    def _close_soon(self, reason: str) -> None:
        """Close at the loop's next turn: whoever is sending does not expect to be told in the middle of it."""
        asyncio.get_running_loop().call_soon(self.close, reason)

    def _gather(self) -> None:
        self._is_gathering = False
        if self.is_open:
            self._pending = deque(joined(self._pending))
            self._writable()

    def _want_write(self, wanted: bool) -> None:
        if wanted != self._wants_write:
            self._wants_write = wanted
            self._poller.want_write(self._sock.fileno(), wanted)

    def _write(self, frame: OutgoingFrame) -> bool:
        """Send what the socket takes; True when the frame went whole, else it keeps what is left."""
        try:
            sent = self._sock.sendmsg([frame.data], rights(frame)) if frame.fds else self._sock.send(frame.data)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self._close_soon(f"the connection broke: {error.strerror}")
            frame.discard()
            return True
        frame.discard()
        frame.fds = ()
        if sent == len(frame.data):
            return True
        frame.data = frame.data[sent:]
        return False

    def _writable(self) -> None:
        while self._pending and self.is_open:
            size = len(self._pending[0].data)
            if not self._write(self._pending[0]):
                self._pending_bytes -= size - len(self._pending[0].data)
                self._want_write(True)
                return
            self._pending_bytes -= size
            self._pending.popleft()
        if self.is_open:
            self._want_write(False)


def _ignore(_: object) -> None:
    """Of a closed channel nobody hears any more."""
