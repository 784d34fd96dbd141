"""Device memory mapped into this process's addresses, and unmapped when nobody can be reading it any more."""

from __future__ import annotations

import threading
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from ipc.cuda_dlpack import CUDA, TYPES, wrap
from ipc.cuda_driver import CAPTURE_ERRORS, call, driver, is_capturing, primary_context, relaxed
from ipc.errors import CudaFailed, OutOfBounds

if TYPE_CHECKING:
    from ipc.cuda_driver import Context

_CAPTURE_POLL_SECONDS = 0.01


class Mapping:
    """A range of addresses on one device. It is unmapped some time after the last reference to it is gone.

    Work that reads it may still be queued then, on any stream. So a thread of its own first waits for all work of the
    device, which whoever dropped the last view does not have to wait for. That happens once in the life of a pool.

    Attributes:
        address, nbytes: where it is in this process.
        ordinal: the device whose access was granted, in this process.
    """

    __slots__ = ("__weakref__", "address", "nbytes", "ordinal")

    def __init__(self, handle: Any, nbytes: int, ordinal: int, *, writable: bool) -> None:
        """Map the allocation `handle`, which stays the caller's. `ordinal` must be able to access its device.

        Raises `CudaFailed`, with nothing mapped, if the allocation is smaller.
        """
        with primary_context(ordinal), relaxed():
            self.address = _map(handle, nbytes, ordinal, writable)
        self.nbytes = nbytes
        self.ordinal = ordinal
        weakref.finalize(self, _retire, self.address, nbytes, ordinal).atexit = False

    def tensor(self, offset: int, nbytes: int, owner: object) -> torch.Tensor:
        """uint8 `[nbytes]` at `offset`, without a copy. Its storage keeps the mapping and `owner`."""
        return self.matrix(offset, (1, nbytes), "uint8", owner)[0]

    def matrix(self, offset: int, shape: tuple[int, int], dtype: str, owner: object) -> torch.Tensor:
        """The same of another type (a name of `TYPES`), `shape`."""
        nbytes = shape[0] * shape[1] * TYPES[dtype].num_bits // 8
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise OutOfBounds(f"bytes {offset} to {offset + nbytes} are outside a region of {self.nbytes} bytes")
        return wrap(self.address + offset, shape, dtype, CUDA, self.ordinal, (self, owner))


def _map(handle: Any, nbytes: int, ordinal: int, writable: bool) -> int:
    flags = driver.CUmemAccess_flags
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = ordinal
    access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
    address = call(driver.cuMemAddressReserve, nbytes, 0, 0, 0)
    try:
        call(driver.cuMemMap, address, nbytes, 0, handle, 0)
        try:
            call(driver.cuMemSetAccess, address, nbytes, [access], 1)
        except CudaFailed:
            call(driver.cuMemUnmap, address, nbytes)
            raise
    except CudaFailed:
        call(driver.cuMemAddressFree, address, nbytes)
        raise
    return int(address)


def _retire(address: int, nbytes: int, ordinal: int) -> None:
    stream = torch.cuda.current_stream(ordinal).cuda_stream
    work = (primary_context(ordinal), stream, address, nbytes)
    with suppress(RuntimeError):  # the interpreter exits: no thread can start, and the mapping goes with the process
        threading.Thread(target=_unmap, args=work, name="cuda-unmap", daemon=True).start()


def _unmap(context: Context, stream: int, address: int, nbytes: int) -> None:
    with suppress(CudaFailed), context, relaxed():  # a device that failed gives nothing back before the process ends
        await_device(stream)
        call(driver.cuMemUnmap, address, nbytes)
        call(driver.cuMemAddressFree, address, nbytes)


def await_device(stream: int) -> None:
    """Wait until all work of the current context is done, and first until no graph is captured on `stream`.

    A context cannot be waited for while one of its streams is being captured. Of streams that are captured elsewhere
    nobody can know: such a capture fails, and once it has ended this goes on.
    """
    while is_capturing(stream) or not _synchronized():
        time.sleep(_CAPTURE_POLL_SECONDS)


def _synchronized() -> bool:
    """False if a capture forbids it."""
    try:
        call(driver.cuCtxSynchronize)
    except CudaFailed as error:
        if error.code not in CAPTURE_ERRORS:
            raise
        return False
    return True
