"""Every exception that ipc raises on purpose.

IpcError
├── MemoryUnavailable    the system cannot give the memory that was asked for
├── MemorySealError      a descriptor is not a memfd, or lacks a seal that its reader relies on
├── OutOfBounds          a range reaches outside a region (also ValueError)
├── ExtentTooLarge       an extent can never fit into its pool, or a slice into its staging region
├── ControlExhausted     a connection's control memory has no free word
├── BadTransition        a share, a holder, an extent or a pool cannot go from its state to the one asked for
│   └── SliceGone        an offer or a staged slice is over, or was claimed by all it was made for
├── DeviceUnavailable    no visible CUDA device may be used as asked, with the rule that refused it
├── CapturingError       a stream is being captured into a graph, where this cannot be done
└── CudaFailed           the driver refused a call that should have succeeded
"""

from __future__ import annotations


class IpcError(Exception):
    """Base of everything ipc raises on purpose."""


class MemoryUnavailable(IpcError):
    """The system cannot give the memory that was asked for."""


class MemorySealError(IpcError):
    """A descriptor is not a memfd, or lacks a seal that its reader relies on."""


class OutOfBounds(IpcError, ValueError):
    """A range reaches outside a region, or a slot outside a control memory."""


class ExtentTooLarge(IpcError):
    """An extent can never fit into its pool, or a slice into its staging region, however much of it is free."""


class ControlExhausted(IpcError):
    """A connection's control memory has no free word: its holder has too many shares."""


class BadTransition(IpcError):
    """A share, a holder, an extent or a pool cannot go from its state to the one asked for."""


class SliceGone(BadTransition):
    """An offer or a staged slice is over, or was claimed by all it was made for: whoever came, came too late."""


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
