"""Frames over a blocking Unix socket: the client's side, and that of the sidecar's own processes."""

from __future__ import annotations

import array
import math
import select
import socket
import time
from collections.abc import Callable

from mmcache.errors import ConnectionLost, ProtocolError
from mmcache.framing import MAX_DESCRIPTORS, Frame, FrameReader, OutgoingFrame, close_all

RECEIVE_BYTES = 1 << 16
_CLOEXEC, _IS_CUT_OFF = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC)  # as flags of an enumeration they are slow
ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_DESCRIPTORS * 4)


def receive_once(sock: socket.socket, reader: FrameReader) -> bool:
    """Read what is there into `reader`, descriptors too. False at the end of the stream.

    Raises:
        ProtocolError: descriptors were cut off.
    """
    data, ancillary, flags, _ = sock.recvmsg(RECEIVE_BYTES, ANCILLARY_BYTES, _CLOEXEC)
    if ancillary or flags & _IS_CUT_OFF:
        fds = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
        reader.feed(data, fds.tolist())
        if flags & _IS_CUT_OFF:
            raise ProtocolError("descriptors were cut off: too many in one message, or none left to this process")
    elif data:
        reader.feed(data)
    return bool(data)


def rights(frame: OutgoingFrame) -> list[tuple[int, int, array.array[int]]]:
    """The ancillary data that sends a frame's descriptors."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", frame.fds))] if frame.fds else []


class BlockingChannel:
    """Frames over one connected socket. `send` and `receive` each by one thread at a time."""

    def __init__(self, sock: socket.socket, clock: Callable[[], float] = time.monotonic) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._clock = clock
        self._reader = FrameReader()
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable.register(sock, select.POLLOUT)

    def send(self, frame: OutgoingFrame, deadline: float | None = None) -> None:
        """Send one frame, whole.

        Raises:
            TimeoutError: the deadline (of the clock) passed.
            ConnectionLost: the other end is gone.
        """
        left = memoryview(frame.data)
        ancillary = rights(frame)
        try:
            while left:
                try:
                    left = left[self._sock.sendmsg([left], ancillary) :]
                    ancillary = []
                except BlockingIOError:
                    self._wait(self._writable, deadline)
        except TimeoutError:
            raise
        except OSError as error:
            raise ConnectionLost(f"the connection broke while sending: {error.strerror}") from error
        finally:
            frame.discard()

    def receive(self, deadline: float | None = None) -> Frame:
        """Wait for the next frame.

        Raises:
            TimeoutError: the deadline (of the clock) passed.
            ConnectionLost: the other end is gone.
            ProtocolError: what came is not a frame.
        """
        while (frame := self._frame_there()) is None:
            self._wait(self._readable, deadline)
        return frame

    @property
    def has_frame(self) -> bool:
        """Whether `receive` would return without looking at the socket."""
        return self._reader.has_frame

    def close(self) -> None:
        """Close the socket and what was received with frames that never completed."""
        self._sock.close()
        self._reader.close()

    def _frame_there(self) -> Frame | None:
        """The next frame, as far as it has come; None when there is nothing more to read now."""
        while (frame := self._reader.next_frame()) is None:
            try:
                alive = self._receive_once()
            except BlockingIOError:
                return None
            except OSError as error:
                raise ConnectionLost(f"the connection broke: {error.strerror}") from error
            if not alive:
                raise ConnectionLost("the other end closed the connection")
        return frame

    def _receive_once(self) -> bool:
        return receive_once(self._sock, self._reader)

    def _wait(self, event: select.poll, deadline: float | None) -> None:
        if deadline is None:
            event.poll()
            return
        remaining = deadline - self._clock()
        if remaining <= 0 or not event.poll(math.ceil(remaining * 1000)):
            raise TimeoutError("the deadline passed")


def take_descriptors(frame: Frame, count: int) -> list[int]:
    """The frame's descriptors, which now belong to the caller.

    Raises:
        ProtocolError: there are not exactly `count`; all are closed.
    """
    if len(frame.fds) != count:
        close_all(frame.fds)
        raise ProtocolError(f"frame carries {len(frame.fds)} descriptors where {count} belong")
    return frame.fds


def raise_descriptor_limit() -> None:
    """Lift this process's soft limit of descriptors to the hard one."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 20) if hard > 0 else 1 << 20, hard))


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process that connected the other end, as the kernel knows it."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, _ = array.array("i", credentials)
    return pid, uid & 0xFFFFFFFF


def same_process(pidfd: int, pid: int) -> bool:
    """Whether `pidfd` is a pidfd, and of process `pid` (any process, where that pid is not visible here)."""
    try:
        with open(f"/proc/self/fdinfo/{pidfd}", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file if ":" in line)
    except (OSError, ValueError):
        return False
    if "Pid" not in fields:
        return False
    return pid == 0 or int(fields["Pid"]) == pid
