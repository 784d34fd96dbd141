"""A client's half of device memory: mapped at the first look at it, for the device that this client reads on.

Nothing of CUDA is loaded before a lease on device memory is read, or a tensor of a device staged.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from ipc.errors import IpcError
from mmcache.errors import DeviceUnavailable

if TYPE_CHECKING:
    import torch

    from ipc.memory_cuda import DeviceReader

Streams: TypeAlias = "torch.cuda.Stream | Iterable[torch.cuda.Stream] | None"
"""As a user names them."""


class DeviceMemory:
    """The memory of a pool on a CUDA device, read only.

    Attributes:
        nbytes: its size.
        uuid: names the device that it is on.
    """

    def __init__(self, fd: int, nbytes: int, uuid: str, ordinal: int | None = None) -> None:
        """`fd` stays the caller's. `ordinal`: the device that reads it, in this process; its own unless given."""
        self.nbytes = nbytes
        self.uuid = uuid
        self._ordinal = ordinal
        self._fd = os.dup(fd)
        self._close = weakref.finalize(self, os.close, self._fd)
        self._lock = threading.RLock()
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
            return DeviceReader.attach(self._fd, self.nbytes, self.uuid, self._ordinal)
        except IpcError as error:
            raise DeviceUnavailable(f"{error}; client.fetch copies it to the host") from error


def checked_ordinal(device: object) -> int | None:
    """The number of a device that a user names, "cuda:3" or torch's own; None for None. Raises ValueError."""
    if device is None:
        return None
    named = re.fullmatch(r"cuda:(\d{1,3})", str(device))
    if named is None:
        raise ValueError(f"device must name a CUDA device with its number, as in 'cuda:0', got {device!r}")
    return int(named[1])


def checked_streams(streams: Streams) -> tuple[torch.cuda.Stream, ...]:
    """Streams that a user names: one, several in anything that can be gone through, or none. Raises TypeError."""
    if streams is None:
        return ()
    several: tuple[Any, ...] = (streams,)
    if not _is_stream(streams):
        with suppress(TypeError):  # it cannot be gone through
            several = tuple(streams)  # type: ignore[arg-type]
    for each in several:
        if not _is_stream(each):
            raise TypeError(f"a CUDA stream or several are needed, as torch.cuda.Stream, got {each!r}")
    return several


def _is_stream(one: Any) -> bool:
    return isinstance(getattr(one, "cuda_stream", None), int) and isinstance(getattr(one, "device_index", None), int)


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """What this thread queues work on."""
    import torch

    return torch.cuda.current_stream(device.index)  # a number is looked at faster


def is_on_device(item: object) -> bool:
    """Whether it is a dense tensor on a CUDA device."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(item, torch.Tensor):
        return False
    return bool(item.device.type == "cuda" and item.layout is torch.strided and not item.is_nested)
