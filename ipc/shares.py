"""Shares: one consumer's right to read one extent, and the states that it and its holder go through.

The allowed transitions are two tables.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

from ipc.errors import BadTransition

if TYPE_CHECKING:
    from ipc.leases import Holder


class ShareState(enum.IntEnum):
    """The life of a share."""

    HELD = 0
    QUARANTINED = 1  # given up on, but the process lives: reads may still be queued
    ACKNOWLEDGED = 2
    DIED = 3


class HolderState(enum.IntEnum):
    """The life of a connection."""

    CONNECTED = 0
    QUARANTINED = 1
    DEAD = 2


SHARE_TRANSITIONS: dict[ShareState, frozenset[ShareState]] = {
    ShareState.HELD: frozenset({ShareState.QUARANTINED, ShareState.ACKNOWLEDGED, ShareState.DIED}),
    ShareState.QUARANTINED: frozenset({ShareState.ACKNOWLEDGED, ShareState.DIED}),
    ShareState.ACKNOWLEDGED: frozenset(),
    ShareState.DIED: frozenset(),
}
HOLDER_TRANSITIONS: dict[HolderState, frozenset[HolderState]] = {
    HolderState.CONNECTED: frozenset({HolderState.QUARANTINED, HolderState.DEAD}),
    HolderState.QUARANTINED: frozenset({HolderState.DEAD}),
    HolderState.DEAD: frozenset(),
}
HELD_BY: dict[HolderState, frozenset[ShareState]] = {
    HolderState.CONNECTED: frozenset({ShareState.HELD, ShareState.QUARANTINED}),
    HolderState.QUARANTINED: frozenset({ShareState.QUARANTINED}),
    HolderState.DEAD: frozenset(),
}
"""The states of a holder's shares, by its own."""


# A name of a module is much cheaper to read than a member of an enumeration (150 ns on Python 3.11).
HELD = ShareState.HELD


class Leasable(Protocol):
    """What a share is held on. It counts its shares, and is not reused while it has one."""

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""

    def share_granted(self, now: float) -> None:
        """A share begins. Raises `BadTransition`, and nothing begins, if it may not be leased."""

    def share_ended(self) -> None:
        """A share ended; called once for each that began."""


class Share:
    """One consumer's right to read one extent.

    Attributes:
        slot: its word in the holder's control memory.
        generation: the value that acknowledges it; never 0, new on every reuse of the slot.
        granted_at: when, on the holder's clock, in seconds.
    """

    __slots__ = ("extent", "generation", "granted_at", "holder", "slot", "state")

    def __init__(self, holder: Holder, slot: int, generation: int, extent: Leasable, granted_at: float) -> None:
        self.holder = holder
        self.slot = slot
        self.generation = generation
        self.extent = extent
        self.granted_at = granted_at
        self.state = HELD

    def quarantine(self) -> None:
        """It is held for too long: counted and shown as such until its acknowledgement or death, which alone end it.

        Raises `BadTransition` unless it is held: it has ended, or is quarantined already.
        """
        self.move(ShareState.QUARANTINED)

    def move(self, to: ShareState) -> None:
        """Change the state (called by its holder). Raises `BadTransition` unless the table allows it."""
        # Every other state may follow HELD: the table is slow to ask, and this is the way of nearly all.
        if (self.state is not HELD or to is HELD) and to not in SHARE_TRANSITIONS[self.state]:
            raise BadTransition(f"share {self.slot}/{self.generation}: {self.state.name} to {to.name}")
        self.state = to
