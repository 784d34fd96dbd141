"""A rank's memories: the pool that it writes, and the ingest region that it shares with the coordinator.

On a CPU both are memfds. On a device the pool is device memory, and the ingest region's pages are locked, so that
copies run beside the encoder, on a stream of their own.
"""

from __future__ import annotations

import functools
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from ipc.errors import CudaFailed
from ipc.memory_shm import ReadOnlyRegion, SharedRegion

if TYPE_CHECKING:
    from numpy.typing import NDArray


class PoolTensor(Protocol):
    """Memory of embeddings, writable by this process. `fd` is its descriptor, `uuid` names its device, if it has one"""

    @property
    def fd(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def uuid(self) -> str: ...
    def tensor(self, offset: int, nbytes: int) -> torch.Tensor: ...


class HostPool:
    """Embeddings in a memfd that nobody but this process can write."""

    uuid = ""

    def __init__(self, nbytes: int) -> None:
        self._region = SharedRegion.create("mmcache-pool", nbytes)
        self._region.seal_for_readers()
        self.fd = self._region.fd
        self.nbytes = self._region.nbytes

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """The bytes, writable, uint8 `[nbytes]`."""
        return torch.from_numpy(self._region.array(offset, nbytes))


class HostIngest:
    """The ingest region, for a rank on a CPU, which only reads there."""

    def __init__(self, fd: int) -> None:
        """`fd` stays the caller's."""
        self._region = ReadOnlyRegion.attach(fd)

    def view(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """The bytes, uint8 `[nbytes]`, only to be read."""
        return self._region.view(offset, nbytes)

    def copy_to(self, offset: int, target: torch.Tensor) -> None:
        """Copy bytes into the pool; complete on return."""
        target.copy_(torch.from_numpy(self._region.view(offset, target.numel(), writable_flag=True)))


class DeviceIngest:
    """The ingest region, for a rank on a device, locked as long as this lives. Of its copies, one thread."""

    def __init__(self, fd: int, device: torch.device) -> None:
        """`fd` stays the caller's. The pages are locked for this process."""
        from ipc.cuda_host import LockedPages

        self._region = SharedRegion.attach(fd)
        self._stream = torch.cuda.Stream(device)
        whole = self._region.array(0, self._region.nbytes)
        with suppress(CudaFailed):  # copies go through memory of the driver then, a third as fast
            self._pages = LockedPages(whole, self._stream.device_index)

    def view(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """The bytes, uint8 `[nbytes]`, only to be read."""
        return self._region.array(offset, nbytes)

    def copy_to(self, offset: int, target: torch.Tensor) -> None:
        """Copy bytes into the pool; complete on return."""
        self._copy(target, self._host(offset, target))

    def copy_from(self, source: torch.Tensor, offset: int) -> None:
        """Copy bytes out of the pool; complete on return."""
        self._copy(self._host(offset, source), source)

    def _host(self, offset: int, like: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self._region.array(offset, like.numel()))

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        self._stream.synchronize()


def open_ingest(fd: int, device: torch.device) -> HostIngest | DeviceIngest:
    """The region for a rank on `device`. `fd` is closed."""
    try:
        return DeviceIngest(fd, device) if device.type == "cuda" else HostIngest(fd)
    finally:
        os.close(fd)


def open_pool(device: torch.device, nbytes: int, fd: int | None) -> PoolTensor:
    """A new pool; or, given its descriptor, the one that a rank before this one left on the device. `fd` is closed.

    Raises:
        IpcError: it is not to be had.
    """
    if device.type != "cuda":
        assert fd is None, "host memory dies with its writer"
        return HostPool(nbytes)
    from ipc.memory_cuda import DeviceRegion

    if fd is None:
        return DeviceRegion.create(nbytes, device)
    try:
        return DeviceRegion.attach(fd, nbytes, device)
    finally:
        os.close(fd)


def use_device(device: torch.device) -> None:
    """Every thread says which device its calls are about."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def bound_memory(device: torch.device, nbytes: int) -> None:
    """What weights and activations take of the device stays below `nbytes`, if it is not 0. Pools are beside that."""
    if device.type == "cuda" and nbytes:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total), device)


def use_stream(device: torch.device, has_high_priority: bool, purpose: str = "work") -> None:
    """This thread's work goes to a stream of its own, which may come before those of other processes under MPS.

    Streams are kept, one for each purpose, and used again by the next rank in this process: for each that there ever
    was, products keep their workspace, some 32 MiB.
    """
    if device.type == "cuda":
        torch.cuda.set_stream(_stream_for(device, -1 if has_high_priority else 0, purpose))


@functools.cache
def _stream_for(device: torch.device, priority: int, purpose: str) -> torch.cuda.Stream:  # noqa: ARG001
    return torch.cuda.Stream(device, priority=priority)


def check_device(device: torch.device) -> None:
    """After a failure: raise `RuntimeError` if this process has lost the device, and can do nothing more."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
