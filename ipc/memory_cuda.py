"""Data memory on CUDA: one allocation that a rank writes and clients map read only, passed on as a file descriptor.

The descriptor alone keeps the memory: its maker may be killed, and a process that has no CUDA context may hold it until
another maps it again. The memory is given back when the last descriptor and the last mapping are gone. There are no
names, so nothing is left behind. Reading only is enforced by the driver: a client that writes to its mapping gets an
error that ends its own CUDA context and nothing else.

Needs torch and cuda-bindings; the classes make a context on no device but the one they are asked for.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import torch

from ipc.cuda_devices import VisibleDevice, by_ordinal, for_reader, visible_devices
from ipc.cuda_driver import OUT_OF_MEMORY, call, driver, primary_context, relaxed
from ipc.cuda_mapping import Mapping
from ipc.errors import CudaFailed, DeviceUnavailable, MemoryUnavailable, OutOfBounds
from ipc.memory_shm import round_up

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["DeviceReader", "DeviceRegion"]


class _Attached:
    """A mapping until it is closed. The parts that reading and writing have in common."""

    def __init__(self, mapping: Mapping, uuid: str) -> None:
        self.nbytes = mapping.nbytes
        self.uuid = uuid
        self.device = torch.device("cuda", mapping.ordinal)
        self._mapping: Mapping | None = mapping

    def tensor(self, offset: int, nbytes: int, owner: object | None = None) -> torch.Tensor:
        """uint8 `[nbytes]` at `offset` on `device`, without a copy.

        The storage keeps the mapping and `owner` alive, through any view made of it, and drops them when the last of
        these dies: from whatever thread, and not at all at the interpreter's exit. Raises `OutOfBounds`.
        """
        if self._mapping is None:
            raise OutOfBounds("the region is closed")
        return self._mapping.tensor(offset, nbytes, owner)

    def matrix(self, offset: int, shape: tuple[int, int], dtype: str, owner: object) -> torch.Tensor:
        """As `tensor`, of that shape and type: a name of `cuda_dlpack.TYPES`."""
        if self._mapping is None:
            raise OutOfBounds("the region is closed")
        return self._mapping.matrix(offset, shape, dtype, owner)

    def close(self) -> None:
        """Give up the mapping. Tensors stay valid; after the last of them it is unmapped. Twice is harmless.

        Unmapping waits, in a thread of its own, until all work of the device is done, which must not happen while
        another thread captures a CUDA graph on that device: the capture would fail, and unmapping wait for its end.
        """
        self._mapping = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class DeviceRegion(_Attached):
    """The memory as its writer sees it, for reading and writing. It owns a descriptor; `close()` returns it.

    Attributes:
        fd: the region's descriptor, close-on-exec, to be passed on; valid until `close()`.
        nbytes: size in bytes, a multiple of the driver's granularity (2 MiB).
        device: where its tensors are: a device of this process, with its ordinal.
        uuid: the same device for other processes.
    """

    def __init__(self, fd: int, mapping: Mapping, uuid: str) -> None:
        """Use `create` or `attach`. Takes ownership of `fd`."""
        super().__init__(mapping, uuid)
        self.fd = fd
        self._close_fd = weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, nbytes: int, device: torch.device | int, *, visible: Sequence[VisibleDevice] | None = None) -> Self:
        """Allocate at least `nbytes` bytes on `device`, set them to zero and map them. Waits until that is done.

        `visible`: the devices of this process, `visible_devices()` unless given. Raises `DeviceUnavailable` if the
        device cannot share memory and `MemoryUnavailable` if it lacks the memory; nothing is kept then.
        """
        if nbytes <= 0:
            raise OutOfBounds(f"device region: nbytes must be positive, got {nbytes}")
        at = by_ordinal(_ordinal(device), visible_devices() if visible is None else visible)
        with primary_context(at.ordinal), relaxed():
            handle, size = _allocate(nbytes, at)
            try:
                mapping = Mapping(handle, size, at.ordinal, writable=True)
                fd: int = call(driver.cuMemExportToShareableHandle, handle, _DESCRIPTOR, 0)
            finally:
                call(driver.cuMemRelease, handle)  # mapping and descriptor keep the memory
        os.set_inheritable(fd, False)
        region = cls(fd, mapping, at.uuid)
        region.tensor(0, size).zero_()
        torch.cuda.synchronize(at.ordinal)
        return region

    @classmethod
    def attach(
        cls, fd: int, nbytes: int, device: torch.device | int, *, visible: Sequence[VisibleDevice] | None = None
    ) -> Self:
        """Map memory made by another process, which may be dead by now. `fd` stays the caller's.

        `device` must be the memory's own. Raises as `DeviceReader.attach` does.
        """
        seen = visible_devices() if visible is None else visible
        at = by_ordinal(_ordinal(device), seen)
        mapping = _import(fd, nbytes, at.uuid, at, seen, writable=True)
        return cls(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0), mapping, at.uuid)

    def close(self) -> None:
        """Close the descriptor and give up the mapping. Tensors stay valid. Twice is harmless."""
        super().close()
        self._close_fd()


class DeviceReader(_Attached):
    """The memory as a client sees it, for reading. It holds no descriptor.

    Writing to a tensor of it is a CUDA error that ends the process's context: copy out before in-place operations.

    Attributes:
        nbytes: size in bytes.
        device: where its tensors are: the consumer's own device, in this process's numbering.
        uuid: the device that has the memory.
    """

    @classmethod
    def attach(
        cls,
        fd: int,
        nbytes: int,
        uuid: str,
        device: torch.device | int | None = None,
        *,
        visible: Sequence[VisibleDevice] | None = None,
    ) -> Self:
        """Map received memory of `nbytes` bytes that is on the device `uuid`. `fd` stays the caller's.

        It is read by `device`, which is that device itself unless given; another one needs peer access. The numbers of
        devices may differ between the processes. Raises `DeviceUnavailable` if that cannot be, `OutOfBounds` if the
        memory is not of that size, and `MemoryUnavailable` if `fd` is no device memory, or that of another device.
        """
        seen = visible_devices() if visible is None else visible
        reader = for_reader(uuid, None if device is None else _ordinal(device), seen)
        return cls(_import(fd, nbytes, uuid, reader, seen, writable=False), uuid)


_DESCRIPTOR = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _ordinal(device: torch.device | int) -> int:
    if isinstance(device, int):
        return device
    if device.type != "cuda" or device.index is None:
        raise DeviceUnavailable(f"a CUDA device with its number is needed, as in cuda:0, got {device}")
    return device.index


def _allocate(nbytes: int, at: VisibleDevice) -> tuple[Any, int]:
    wanted = driver.CUmemAllocationProp()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = at.ordinal
    wanted.requestedHandleTypes = _DESCRIPTOR
    recommended = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    size = round_up(nbytes, call(driver.cuMemGetAllocationGranularity, wanted, recommended))
    try:
        return call(driver.cuMemCreate, size, wanted, 0), size
    except CudaFailed as error:
        if error.code != OUT_OF_MEMORY:
            raise
        free, total = call(driver.cuMemGetInfo)
        raise MemoryUnavailable(f"{size} bytes asked for on {at}: {free} of its {total} bytes are free") from error


def _import(
    fd: int, nbytes: int, uuid: str, reader: VisibleDevice, visible: Sequence[VisibleDevice], *, writable: bool
) -> Mapping:
    with primary_context(reader.ordinal), relaxed():
        try:
            handle = call(driver.cuMemImportFromShareableHandle, fd, _DESCRIPTOR)
        except CudaFailed as error:
            raise MemoryUnavailable(
                f"descriptor {fd} cannot be imported as memory of device {uuid}: {error}"
            ) from error
        try:
            _check_owner(handle, fd, uuid, visible)
            return Mapping(handle, nbytes, reader.ordinal, writable=writable)
        except CudaFailed as error:
            raise OutOfBounds(
                f"the memory behind descriptor {fd} cannot be mapped as {nbytes} bytes on {reader}: {error}"
            ) from error
        finally:
            call(driver.cuMemRelease, handle)


def _check_owner(handle: Any, fd: int, uuid: str, visible: Sequence[VisibleDevice]) -> None:
    """The memory knows where it is. Taken for another device's it would be read over the bus, or not at all."""
    ordinal = call(driver.cuMemGetAllocationPropertiesFromHandle, handle).location.id
    found = next((device.uuid for device in visible if device.ordinal == ordinal), f"cuda:{ordinal}")
    if found != uuid:
        raise MemoryUnavailable(f"the memory behind descriptor {fd} is on device {found}, not on {uuid} as was said")
