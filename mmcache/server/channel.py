"""Frames over a Unix socket on the event loop. asyncio's streams drop descriptors, so this calls recvmsg itself."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable

from mmcache.errors import ProtocolError
from mmcache.protocol import Frame, FrameReader, OutgoingFrame, close_all
from mmcache.transport import receive_once, rights

log = logging.getLogger(__name__)

MAX_PENDING_BYTES = 16 << 20
"""A peer that does not read is cut off when this much waits for it."""


class Channel:
    """One connected socket: `on_frame` gets every frame, `on_close` is called once, with the reason.

    A `ProtocolError` raised by `on_frame` closes the channel. The channel owns the socket.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        on_frame: Callable[[Frame], None],
        on_close: Callable[[str], None],
    ) -> None:
        sock.setblocking(False)
        self._loop = loop
        self._sock = sock
        self._on_frame = on_frame
        self._on_close = on_close
        self._reader = FrameReader()
        self._pending: deque[OutgoingFrame] = deque()
        self._pending_bytes = 0
        self._drained: asyncio.Future[None] | None = None
        self.is_open = True
        loop.add_reader(sock.fileno(), self._readable)

    def send(self, frame: OutgoingFrame) -> None:
        """Send now what the socket takes and the rest when it can. On a closed channel the frame is dropped."""
        if not self.is_open:
            self._forget(frame)
            return
        if not self._pending and self._write(frame):
            return
        if frame.fds and not frame.owned:
            frame.fds, frame.owned = [os.dup(fd) for fd in frame.fds], True
        self._pending.append(frame)
        self._pending_bytes += len(frame.data)
        if self._pending_bytes > MAX_PENDING_BYTES:
            self.close("the peer does not read")
        elif self.is_open:
            self._loop.add_writer(self._sock.fileno(), self._writable)

    async def flushed(self) -> None:
        """Wait until everything sent has been taken by the socket, or the channel is closed."""
        if self._pending and self.is_open:
            self._drained = self._drained or self._loop.create_future()
            await self._drained

    def close(self, reason: str = "closed") -> None:
        """Close the socket and everything that was pending. Doing so twice is harmless."""
        if not self.is_open:
            return
        self.is_open = False
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        self._reader.close()
        for frame in self._pending:
            self._forget(frame)
        self._pending.clear()
        self._settle_drained()
        self._on_close(reason)

    def _readable(self) -> None:
        try:
            alive = receive_once(self._sock, self._reader)
            while self.is_open and (frame := self._reader.next_frame()) is not None:
                self._on_frame(frame)
        except (BlockingIOError, InterruptedError):
            return
        except ProtocolError as error:
            log.warning("closing a connection: %s", error)
            self.close(str(error))
        except OSError as error:
            self.close(f"the connection broke: {error.strerror}")
        else:
            if not alive:
                self.close("the other end closed the connection")

    def _write(self, frame: OutgoingFrame) -> bool:
        """Send what the socket takes; True when the frame went whole, else it keeps what is left."""
        try:
            sent = self._sock.sendmsg([frame.data], rights(frame)) if frame.fds else self._sock.send(frame.data)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self._loop.call_soon(self.close, f"the connection broke: {error.strerror}")
            self._forget(frame)
            return True
        self._forget(frame)
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
                return
            self._pending_bytes -= size
            self._pending.popleft()
        if self.is_open:
            self._loop.remove_writer(self._sock.fileno())
        self._settle_drained()

    def _settle_drained(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._drained = None

    @staticmethod
    def _forget(frame: OutgoingFrame) -> None:
        if frame.owned:
            close_all(frame.fds)
            frame.owned = False
