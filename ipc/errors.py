"""Every exception that ipc raises on purpose.

IpcError
├── MemoryUnavailable    the system cannot give the memory that was asked for
├── MemorySealError      a descriptor is not a memfd, or lacks a seal that its reader relies on
├── OutOfBounds          a range reaches outside a region (also ValueError)
├── ExtentTooLarge       an extent can never fit into the pool
├── ControlExhausted     a connection's control memory has no free word
└── BadTransition        a share, a holder, an extent or a pool cannot go from its state to the one asked for
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
    """An extent can never fit into the pool, however much of it is free."""


class ControlExhausted(IpcError):
    """A connection's control memory has no free word: its holder has too many shares."""


class BadTransition(IpcError):
    """A share, a holder, an extent or a pool cannot go from its state to the one asked for."""
