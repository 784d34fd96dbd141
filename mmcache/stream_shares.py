"""Shares that are read on a device: each ends when the streams that read it get there."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ipc.errors import CapturingError as IpcCapturingError
from ipc.errors import IpcError
from mmcache.device_memory import DeviceMemory, current_stream
from mmcache.errors import CapturingError, DeviceUnavailable

if TYPE_CHECKING:
    import torch

    from ipc.control import ControlMemory
    from ipc.control_cuda import StreamAcknowledger

MIN_LOOK = 256
"""Of shares that were given to streams: whether they have ended is looked at when there are this many, or twice as many
as at the last look had not."""
RETRY_S = 0.01
"""Between attempts to end what a capture keeps from ending."""


class Read:
    """How a share is read.

    Attributes:
        memory: what it is in.
        named: streams that read it, as its user said; seen: those that were current when views were taken. By what
            they are, since torch makes a new object each time it is asked.
    """

    __slots__ = ("memory", "named", "seen")

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory = memory
        self.named: dict[tuple[int, int], torch.cuda.Stream] = {}
        self.seen: dict[tuple[int, int], torch.cuda.Stream] = {}

    def streams(self, given: Sequence[torch.cuda.Stream]) -> list[torch.cuda.Stream]:
        """All that must be done with it: those named, and those given, or else those seen and this thread's current."""
        if given:
            found = {_id(stream): stream for stream in given}
        else:
            current = current_stream(self.memory.device)
            found = {_id(current): current, **self.seen}
        return list((found | self.named).values())


class StreamShares:
    """The shares of one connection that were read on a device. Thread-safe; a finalizer may come in the middle.

    Attributes:
        reads: of each share that has a view, how it is read, until its end is queued on streams.
    """

    def __init__(self, control: ControlMemory) -> None:
        self._control = control
        self._acknowledger: StreamAcknowledger | None = None
        self._lock = threading.RLock()
        self.reads: dict[int, Read] = {}
        self._queued: dict[int, None] = {}
        self._look_at = MIN_LOOK
        self._retries = Retries()

    @property
    def counters(self) -> dict[str, int]:
        """How acknowledgements were made: by `stream_writes`, or by a thread that waits (`fallbacks`)."""
        made = self._acknowledger
        return {
            "stream_writes": 0 if made is None else made.num_stream_writes,
            "fallbacks": 0 if made is None else made.num_fallbacks,
        }

    def viewed(self, token: int, memory: DeviceMemory, named: Sequence[torch.cuda.Stream] = ()) -> None:
        """A share gets a view, to be read on the stream that is current now, on the one at its end, and on these.

        A stream that is being captured reads nothing now; its graph's replays may, on whatever stream they are.

        Raises:
            DeviceUnavailable: this process cannot use the device.
        """
        stream = current_stream(memory.device)
        if self._acknowledger is None:
            self._make(memory.device)  # here and not in a finalizer
        read = self.reads.get(token) or self.reads.setdefault(token, Read(memory))
        if (key := _id(stream)) not in read.seen and not _is_captured(stream):
            read.seen[key] = stream
        if named:
            read.named.update((_id(each), each) for each in named)

    def check(self, tokens: Iterable[int]) -> None:
        """Raise `CapturingError` if one of these shares cannot end now for that reason; see `acknowledge`."""
        reads = [read for token in tokens if (read := self.reads.get(token)) is not None]
        if not reads:
            return
        from ipc.control_cuda import refuse_captures

        try:
            refuse_captures({_id(stream): stream for read in reads for stream in read.streams(())}.values())
        except IpcCapturingError as error:
            raise CapturingError(str(error)) from error
        except IpcError:  # the device failed: nothing can end there any more, and it is no reason to go on
            return

    def acknowledge(
        self, token: int, given: Sequence[torch.cuda.Stream], claim: Callable[[], bool], unclaim: Callable[[], None]
    ) -> None:
        """End a share once its streams, and those given or else the current one, have done what is queued on them.

        `claim` says whether it is this call's to end, `unclaim` that it goes on after all.

        Raises:
            CapturingError: one of the streams is being captured into a graph; nothing has changed.
            DeviceUnavailable: the device failed; likewise.
        """
        read, made = self.reads.get(token), self._acknowledger
        if read is None or made is None:  # another thread was faster
            return
        streams = read.streams(given)
        if not claim():
            return
        try:
            made.acknowledge(token >> 32, token & 0xFFFFFFFF, streams)
        except IpcCapturingError as error:
            unclaim()
            raise CapturingError(str(error)) from error
        except IpcError as error:
            unclaim()
            raise DeviceUnavailable(f"the lease goes on until this process ends: {error}") from error
        except BaseException:
            unclaim()
            raise
        self._queued[token] = None  # `going_on` looks here last
        self.reads.pop(token, None)
        if len(self._queued) >= self._look_at:
            self._forget_done()
            self._look_at = max(MIN_LOOK, 2 * len(self._queued))

    def end_later(self, token: int, acknowledge: Callable[[Sequence[torch.cuda.Stream]], None]) -> None:
        """A capture refused to let a share end whose last view died in this thread now: it ends after the capture.

        On the streams that are this thread's now, whichever thread does it.
        """
        read = self.reads.get(token)
        if read is None:
            return
        streams = read.streams(())

        def is_over() -> bool:
            try:
                acknowledge(streams)
            except CapturingError:
                return False
            except DeviceUnavailable:  # it goes on until this process ends
                return True
            return True

        self._retries.add(is_over)

    def going_on(self) -> list[int]:
        """Shares whose streams are not there yet. One is in `reads` until it is among those that are queued."""
        known = list(self.reads)
        self._forget_done()
        return known + list(self._queued)

    def _forget_done(self) -> None:
        # A slot's later generation is higher: the coordinator grants it anew only after it has seen the one before.
        for token in list(self._queued):
            if (self._control.read(token >> 32) - token) & 0xFFFFFFFF < 1 << 31:
                self._queued.pop(token, None)

    def _make(self, device: torch.device) -> None:
        from ipc.control_cuda import StreamAcknowledger

        with self._lock:
            if self._acknowledger is None:
                try:
                    self._acknowledger = StreamAcknowledger(self._control, device)
                except IpcError as error:
                    raise DeviceUnavailable(f"{error}; client.fetch copies to the host") from error


class Retries:
    """Does again what a capture refuses, until it is over: in a thread that is there only while something is left."""

    def __init__(self) -> None:
        self._left: deque[Callable[[], bool]] = deque()
        self._lock = threading.RLock()
        self._is_running = False

    def add(self, is_over: Callable[[], bool]) -> None:
        """Call it until it returns True. May come from a finalizer, in the middle of anything."""
        self._left.append(is_over)
        with self._lock:
            if self._is_running:
                return
            self._is_running = True
        with suppress(RuntimeError):  # the interpreter exits: no thread can start, and all ends with the process
            threading.Thread(target=self._run, name="mmcache-after-capture", daemon=True).start()

    def _run(self) -> None:
        from ipc.cuda_driver import relaxed

        with relaxed():
            while self._has_some():
                for _ in range(len(self._left)):
                    is_over = self._left.popleft()
                    if not is_over():
                        self._left.append(is_over)
                threading.Event().wait(RETRY_S)

    def _has_some(self) -> bool:
        with self._lock:
            if not self._left:
                self._is_running = False
            return self._is_running


def _is_captured(stream: torch.cuda.Stream) -> bool:
    """Whether this thread's current stream of a device is being captured; the driver is not asked where torch knows."""
    if not stream.cuda_stream:  # the default stream cannot be
        return False
    import torch

    if stream.device_index == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    from ipc.cuda_driver import is_captured

    return is_captured(stream)


def _id(stream: torch.cuda.Stream) -> tuple[int, int]:
    return stream.device_index, stream.cuda_stream
