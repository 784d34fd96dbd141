"""The client's channel: frames over one socket, in both directions at once."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable

from mmcache.errors import ConnectionLost
from mmcache.framing import Frame, OutgoingFrame
from mmcache.transport import BlockingChannel, rights


class DuplexChannel(BlockingChannel):
    """One thread receives while any may send, which never waits for the other end to read.

    Args:
        spin_s: how long `next_frame` polls before it sleeps. A sleeping processor takes tens of microseconds to wake,
            as long as a whole answer from the pool.

    Attributes:
        reads_whole, writes_whole: False while bytes are moved, and for good if an exception of a signal handler came in
            between: then nobody knows any more where a frame begins. Whoever takes a frame sets `reads_whole` again
            once it cannot be lost any more.
    """

    def __init__(
        self, sock: socket.socket, clock: Callable[[], float] = time.monotonic, *, spin_s: float = 0.0
    ) -> None:
        super().__init__(sock, clock)
        self._spin_s = spin_s
        self._either = select.poll()
        self._either.register(sock, select.POLLIN | select.POLLOUT)
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._readable.register(self._waker, select.POLLIN)
        self._either.register(self._waker, select.POLLIN)
        self._sending: OutgoingFrame | None = None
        self._left = memoryview(b"")
        self.reads_whole = self.writes_whole = True

    @property
    def is_sending(self) -> bool:
        """Whether a frame has gone in part."""
        return self._sending is not None

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._sock.fileno()

    def send_some(self, frames: deque[OutgoingFrame]) -> bool:
        """Send from the left of `frames` what the socket takes now. True if all is gone.

        Raises:
            ConnectionLost: the other end is gone.
        """
        try:
            while True:
                if self._sending is None:
                    if not frames:
                        return True
                    self._sending = frames.popleft()
                    self._left = memoryview(self._sending.data)
                self._send_part(self._sending)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ConnectionLost(f"the connection broke while sending: {error.strerror}") from error

    def send_all(self, frames: deque[OutgoingFrame], deadline: float) -> None:
        """Send all of `frames`.

        Raises:
            TimeoutError: the deadline passed.
            ConnectionLost: the other end is gone.
        """
        while not self.send_some(frames):
            self._wait(self._writable, deadline)

    def next_frame(self, deadline: float, wants_to_send: Callable[[], bool]) -> Frame | None:
        """Wait for the next frame; None when there is none, but the socket takes what waits to be sent, or `wake` came.

        Raises:
            TimeoutError: the deadline passed.
            ConnectionLost: the other end is gone.
            ProtocolError: what came is not a frame.
        """
        spin_until = self._clock() + self._spin_s
        while (frame := self._frame_there()) is None:
            now = self._clock()
            if now < spin_until and now < deadline:
                os.sched_yield()  # whoever answers may be waiting for this very processor
            elif wants_to_send():
                self._wait(self._either, deadline)
                self._was_woken()
                return self._frame_there()
            else:
                self._wait(self._readable, deadline)
                if self._was_woken():
                    return None
        return frame

    def wake(self) -> None:
        """Have `next_frame` return, in whichever thread it waits, or at its next wait. Nobody closes it meanwhile."""
        if self._waker >= 0:
            os.eventfd_write(self._waker, 1)

    def frame_there(self) -> Frame | None:
        """The next frame, or None when there is nothing more to read now. Raises as `next_frame` does."""
        return self._frame_there()

    def is_hung_up(self) -> bool:
        """Whether the other end is gone, without reading what it said before."""
        if (fd := self._sock.fileno()) < 0:
            return True
        event = select.poll()  # one of its own: any number of threads may ask
        event.register(fd, select.POLLRDHUP)
        return bool(event.poll(0))

    def shut_down(self) -> None:
        """End both directions: whoever waits on the socket wakes. Twice is harmless."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, and what was received or sent in part."""
        super().close()
        if self._sending is not None:
            self._sending.discard()
            self._sending = None
        if self._waker >= 0:
            os.close(self._waker)
            self._waker = -1

    def _frame_there(self) -> Frame | None:
        self.reads_whole = False
        return super()._frame_there()

    def _receive_once(self) -> bool:
        try:
            return super()._receive_once()
        except BlockingIOError:
            self.reads_whole = True  # nothing came, and no frame is on its way to the caller
            raise

    def _was_woken(self) -> bool:
        try:
            return self._waker >= 0 and os.eventfd_read(self._waker) > 0
        except BlockingIOError:
            return False

    def _send_part(self, frame: OutgoingFrame) -> None:
        is_first = len(self._left) == len(frame.data)
        self.writes_whole = False
        try:
            self._left = self._left[self._sock.sendmsg([self._left], rights(frame) if is_first else ()) :]
        except BlockingIOError:
            self.writes_whole = True
            raise
        if not self._left:
            frame.discard()
            self._sending = None
        self.writes_whole = True
