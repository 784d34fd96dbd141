"""A client's half of device memory: mapped at the first look at it, acknowledged in stream order.

Nothing of CUDA is loaded before a lease on device memory is read, or a tensor of a device staged.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from ipc.errors import IpcError
from mmcache.errors import CapturingError, DeviceUnavailable

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from ipc.control import ControlMemory
    from ipc.control_cuda import StreamAcknowledger
    from ipc.memory_cuda import DeviceReader

Streams: TypeAlias = "torch.cuda.Stream | Sequence[torch.cuda.Stream] | None"


MIN_LOOK = 256
"""Of shares that were given to streams: whether they have ended is looked at when there are this many, or twice as many
as at the last look had not."""


class DeviceMemory:
    """The memory of a pool on a CUDA device, read only.

    Attributes:
        nbytes: its size.
        uuid: names the device that it is on.
    """

    def __init__(self, fd: int, nbytes: int, uuid: str) -> None:
        """`fd` stays the caller's."""
        self.nbytes = nbytes
        self.uuid = uuid
        self._fd = os.dup(fd)
        self._close = weakref.finalize(self, os.close, self._fd)
        self._lock = threading.Lock()
        self._reader: DeviceReader | None = None

    @property
    def device(self) -> torch.device:
        """This process's name of the device that it is mapped on. Raises `DeviceUnavailable`."""
        return self._mapped().device

    def tensor(self, offset: int, shape: tuple[int, int], dtype: str, owner: object) -> torch.Tensor:
        """An embedding, whose storage keeps mapping and `owner` alive. Raises `DeviceUnavailable`."""
        return (self._reader or self._mapped()).matrix(offset, shape, dtype, owner)

    def _mapped(self) -> DeviceReader:
        if self._reader is None:
            with self._lock:
                if self._reader is None:
                    self._reader = self._attached()
                    self._close()
        return self._reader

    def _attached(self) -> DeviceReader:
        try:
            from ipc.memory_cuda import DeviceReader
        except ModuleNotFoundError as error:
            raise DeviceUnavailable(f"{error}: install mmcache[gpu], or use client.fetch") from None
        try:
            return DeviceReader.attach(self._fd, self.nbytes, self.uuid)
        except IpcError as error:
            raise DeviceUnavailable(f"{error}; client.fetch copies it to the host") from error


class StreamAcknowledgements:
    """The shares of one connection that were read on a device: they end when the streams that read them get there.

    Attributes:
        reads: of each live share that has a view, the memory, and the streams that were named with it.
    """

    def __init__(self, control: ControlMemory) -> None:
        self._control = control
        self._acknowledger: StreamAcknowledger | None = None
        self._lock = threading.Lock()
        self.reads: dict[int, tuple[DeviceMemory, tuple[torch.cuda.Stream, ...]]] = {}
        self._in_stream: list[int] = []
        self._look_at = MIN_LOOK

    @property
    def counters(self) -> dict[str, int]:
        """How acknowledgements were made: by `stream_writes`, or by a thread that waits (`fallbacks`)."""
        made = self._acknowledger
        return {
            "stream_writes": 0 if made is None else made.num_stream_writes,
            "fallbacks": 0 if made is None else made.num_fallbacks,
        }

    def viewed(self, token: int, memory: DeviceMemory, streams: Streams = None) -> None:
        """A share has a view, which is read on the streams that are current when it ends, and on these."""
        known = self.reads.get(token, (memory, ()))[1]
        self.reads[token] = (memory, (*known, *listed(streams)))

    def check(self, tokens: Iterable[int]) -> None:
        """Raise `CapturingError` if one of these shares cannot end now; see `acknowledge`."""
        reads = [self.reads[token] for token in tokens if token in self.reads]
        if not reads:
            return
        from ipc.control_cuda import refuse_captures

        try:
            refuse_captures({stream for memory, named in reads for stream in (*named, current_stream(memory.device))})
        except IpcError as error:
            raise CapturingError(str(error)) from error

    def acknowledge(self, token: int, streams: Streams, claim: Callable[[], bool], unclaim: Callable[[], None]) -> None:
        """End a share once its streams, and those given here or else the current one, have done what is queued on them.

        `claim` says whether it is this call's to end, `unclaim` that it goes on after all.

        Raises:
            CapturingError: one of the streams is being captured into a graph; nothing has changed.
        """
        memory, named = self.reads[token]
        wanted = [*named, *(listed(streams) or (current_stream(memory.device),))]
        made = self._acknowledger or self._made(memory.device)
        if not claim():
            return
        try:
            made.acknowledge(token >> 32, token & 0xFFFFFFFF, wanted if len(wanted) == 1 else list(set(wanted)))
        except IpcError as error:
            unclaim()
            raise CapturingError(str(error)) from error
        self.reads.pop(token, None)
        with self._lock:
            self._in_stream.append(token)
            if len(self._in_stream) >= self._look_at:
                self._forget_done()
                self._look_at = max(MIN_LOOK, 2 * len(self._in_stream))

    def pending(self) -> list[int]:
        """Shares whose streams are not there yet."""
        with self._lock:
            self._forget_done()
            return self._in_stream

    def _forget_done(self) -> None:
        # A slot's later generation is higher: the coordinator grants it anew only after it has seen the one before.
        read = self._control.read
        self._in_stream = [token for token in self._in_stream if (read(token >> 32) - token) & 0xFFFFFFFF >= 1 << 31]

    def _made(self, device: torch.device) -> StreamAcknowledger:
        if self._acknowledger is None:
            with self._lock:
                if self._acknowledger is None:
                    from ipc.control_cuda import StreamAcknowledger

                    self._acknowledger = StreamAcknowledger(self._control, device)
        return self._acknowledger


def listed(streams: Streams) -> tuple[torch.cuda.Stream, ...]:
    """One stream, several or none, as several."""
    if streams is None:
        return ()
    return tuple(streams) if isinstance(streams, Sequence) else (streams,)


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """What this thread queues work on."""
    import torch

    return torch.cuda.current_stream(device)


class LockedPages:
    """Memory that devices copy to at full speed, for as long as this lives. Where it cannot be locked, they are slower.

    Attributes:
        is_locked: whether it is.
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        import torch

        self.is_locked = int(torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)) == 0
        if self.is_locked:
            weakref.finalize(self, _unlock, memory).atexit = False


def _unlock(memory: NDArray[np.uint8]) -> None:
    import torch

    torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)


def is_on_device(item: object) -> bool:
    """Whether it is a dense tensor on a CUDA device."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(item, torch.Tensor):
        return False
    return bool(item.device.type == "cuda" and item.layout is torch.strided and not item.is_nested)


def stand_in(item: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape and type here, never written or read: it takes addresses and no memory."""
    import torch

    return torch.empty(item.shape, dtype=item.dtype)


def copy_to_host(item: torch.Tensor, place: NDArray[np.uint8]) -> None:
    """Copy a tensor's values after what is queued on the current stream of its device; complete on return."""
    import torch

    torch.from_numpy(place).view(item.dtype).view(item.shape).copy_(item.detach())
