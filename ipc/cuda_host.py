"""Host memory that devices reach directly: its pages are locked by the driver, for all devices of this process.

Neither torch's current device nor its record of the last error is touched, and no graph that is being captured.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ipc.cuda_driver import call, driver, primary_context, relaxed
from ipc.errors import CudaFailed

if TYPE_CHECKING:
    from numpy.typing import NDArray


class LockedPages:
    """Locks an array's pages for as long as this lives, and keeps the array. Devices copy to it at full speed then."""

    def __init__(self, memory: NDArray[Any], ordinal: int) -> None:
        """Under the context of the device `ordinal`. Raises `CudaFailed` if they cannot be locked."""
        lock_pages(memory, ordinal)
        weakref.finalize(self, _let_go, memory, ordinal).atexit = False


def lock_pages(memory: NDArray[Any], ordinal: int) -> None:
    """Lock an array's pages and map them on the devices. Raises `CudaFailed`, as for pages that are locked already."""
    flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
    with primary_context(ordinal), relaxed():
        call(driver.cuMemHostRegister, _host_address(memory), memory.nbytes, flags)


def unlock_pages(memory: NDArray[Any], ordinal: int) -> None:
    """Undo `lock_pages`, once no device uses the memory any more. The array must still be mapped."""
    with primary_context(ordinal), relaxed():
        call(driver.cuMemHostUnregister, _host_address(memory))


def device_address(memory: NDArray[Any], ordinal: int) -> int:
    """Where the device `ordinal` sees memory that is locked."""
    with primary_context(ordinal):
        return int(call(driver.cuMemHostGetDevicePointer, _host_address(memory), 0))


def _host_address(memory: NDArray[Any]) -> int:
    address: int = memory.__array_interface__["data"][0]
    return address


def _let_go(memory: NDArray[Any], ordinal: int) -> None:
    with suppress(CudaFailed):  # of a device that failed, nothing can be given back before the process ends
        unlock_pages(memory, ordinal)
