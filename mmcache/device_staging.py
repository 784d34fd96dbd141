"""Tensors of CUDA devices on their way into a client's staging region: copied once, after their own stream's work."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

from ipc.errors import IpcError
from mmcache.device_memory import current_stream, is_on_device
from mmcache.errors import CapturingError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from ipc.cuda_host import LockedPages


class DeviceItem(NamedTuple):
    """A tensor on a device, and the stream after whose work it is what it is to be."""

    tensor: torch.Tensor
    stream: torch.cuda.Stream

    def stand_in(self, max_bytes: int) -> torch.Tensor:
        """A tensor of the same shape and type here, never written; never read either, if it has at most `max_bytes`.

        It takes addresses and no memory.
        """
        import torch

        tensor = self.tensor
        if tensor.numel() * tensor.element_size() > max_bytes:  # it is refused by its size
            return torch.empty((), dtype=tensor.dtype, device="cpu").expand(tensor.shape)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")

    def copy_to(self, place: NDArray[np.uint8]) -> None:
        """Copy the values after what is queued on the stream; complete on return, whichever thread calls.

        Waiting for the copy spoils no capture of another thread.
        """
        import torch

        with torch.cuda.stream(self.stream):
            _refuse_capture()
            with _relaxed():
                self._copy_to(place)

    def _copy_to(self, place: NDArray[np.uint8]) -> None:
        import torch

        target = torch.from_numpy(place).view(self.tensor.dtype).view(self.tensor.shape)
        target.copy_(self.tensor.detach())


def device_items(items: Iterable[object]) -> dict[int, DeviceItem]:
    """Those of a call's items that are on a device, by index, with the calling thread's current streams.

    Raises:
        CapturingError: one of these is being captured into a graph: the copy waits for the device.
    """
    found = {
        index: DeviceItem(item, current_stream(item.device))  # type: ignore[attr-defined, arg-type]
        for index, item in enumerate(items)
        if is_on_device(item)
    }
    if found:
        import torch

        for item in found.values():
            with torch.cuda.stream(item.stream):
                _refuse_capture()
    return found


def _relaxed() -> AbstractContextManager[None]:
    try:
        from ipc.cuda_driver import relaxed
    except ModuleNotFoundError:  # without cuda-bindings
        return nullcontext()
    return relaxed()


def _refuse_capture() -> None:
    import torch

    if torch.cuda.is_current_stream_capturing():
        raise CapturingError("a tensor cannot be staged while its stream is being captured into a CUDA graph")


class PageLock:
    """The pages of a client's staging region, locked at the first copy from a device."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._is_tried = False
        self._pages: LockedPages | None = None

    @property
    def has_failed(self) -> bool:
        """Whether they could not be locked: copies are slower then."""
        return self._is_tried and self._pages is None

    def of(self, region: NDArray[np.uint8], device: torch.device) -> LockedPages | None:
        """Keep it while copying, whatever becomes of the connection meanwhile. None if they cannot be locked."""
        with self._lock:
            if not self._is_tried:
                self._pages = _locked(region, device)
                self._is_tried = True
            return self._pages


def _locked(region: NDArray[np.uint8], device: torch.device) -> LockedPages | None:
    try:
        from ipc.cuda_host import LockedPages

        return LockedPages(region, device.index)
    except (ModuleNotFoundError, IpcError):
        return None
