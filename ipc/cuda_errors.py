"""What only memory on CUDA devices can raise.

IpcError
├── DeviceUnavailable    no visible device may be used as asked, with the rule that refused it
├── CapturingError       a stream is being captured into a graph, where this cannot be done
└── CudaFailed           the driver refused a call that should have succeeded
"""

from __future__ import annotations

from ipc.errors import IpcError


class DeviceUnavailable(IpcError):
    """No visible device may be used as asked: it is hidden, or lacks what is needed. The message names the rule."""


class CapturingError(IpcError):
    """A stream is being captured into a CUDA graph, where this cannot be done. Nothing was changed."""


class CudaFailed(IpcError):
    """The driver refused a call that should have succeeded.

    Attributes:
        code: the CUresult.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code
