"""Extents: what a pool is divided into, and the states each of them goes through."""

from __future__ import annotations

import enum
from typing import Protocol

from ipc.errors import BadTransition


class ExtentState(enum.IntEnum):
    """The life of an extent."""

    WRITING = 0  # reserved; its writer fills it
    CACHED = 1  # complete; may be leased, and evicted while nobody reads it
    DEAD = 2  # never handed out again; its last readers are not done
    GONE = 3  # its bytes belong to the pool again


EXTENT_TRANSITIONS: dict[ExtentState, frozenset[ExtentState]] = {
    ExtentState.WRITING: frozenset({ExtentState.CACHED, ExtentState.GONE}),
    ExtentState.CACHED: frozenset({ExtentState.DEAD, ExtentState.GONE}),
    ExtentState.DEAD: frozenset({ExtentState.GONE}),
    ExtentState.GONE: frozenset(),
}


# A name of a module is much cheaper to read than a member of an enumeration (150 ns on Python 3.11).
CACHED = ExtentState.CACHED
WRITING = ExtentState.WRITING


class Owner(Protocol):
    """The pool that an extent is in, as its extents see it."""

    pool_id: int

    def first_share(self, extent: Extent) -> None:
        """The extent had no share, and has one."""

    def last_share(self, extent: Extent) -> None:
        """The extent's last share ended."""


class Extent:
    """A contiguous run of a pool's bytes. Made by `Pool.reserve`; its attributes are for reading, the pool sets them.

    Attributes:
        pool: the pool it is in.
        pool_id: that pool's id.
        offset, nbytes: where it lies; `nbytes` is what was asked for, before alignment.
        key: what it was published under.
        num_shares: shares held on it; an offer of shares counts as one.
        num_pins: readers inside the coordinator.
        last_used: when it was last reserved, leased or touched, in seconds on the pool's clock.
        cost_seconds: how long it took to make.
        info: whatever the publisher attached.
        group: what the publisher tells extents apart by.
        digest: of its bytes as their maker has seen them; None if nobody has.
    """

    __slots__ = (
        "cost_seconds",
        "digest",
        "group",
        "info",
        "key",
        "last_used",
        "nbytes",
        "num_pins",
        "num_shares",
        "offset",
        "pool",
        "pool_id",
        "state",
    )

    def __init__(self, pool: Owner, offset: int, nbytes: int, now: float) -> None:
        self.pool = pool
        self.pool_id = pool.pool_id
        self.offset = offset
        self.nbytes = nbytes
        self.key: bytes | None = None
        self.state = WRITING
        self.num_shares = 0
        self.num_pins = 0
        self.last_used = now
        self.cost_seconds = 0.0
        self.info: object = None
        self.group = b""
        self.digest: int | None = None

    def __repr__(self) -> str:
        place = f"{self.pool_id}:{self.offset}+{self.nbytes}"
        return f"<Extent {place} {self.state.name} shares={self.num_shares} pins={self.num_pins}>"

    @property
    def is_busy(self) -> bool:
        """Whether somebody may still read it."""
        return self.num_shares > 0 or self.num_pins > 0

    @property
    def is_lost(self) -> bool:
        """Whether it is no longer being written: its pool lost its writer, or it is complete or gone."""
        return self.state is not WRITING

    def share_granted(self, now: float) -> None:
        """A share begins (called by its holder). Raises `BadTransition` unless the extent is cached."""
        if self.state is not CACHED:
            raise BadTransition(f"{self!r} may not be leased")
        self.last_used = now
        num_before = self.num_shares
        self.num_shares = num_before + 1
        if not num_before:
            self.pool.first_share(self)

    def share_ended(self) -> None:
        """A share ended (called by its holder)."""
        num_left = self.num_shares - 1
        assert num_left >= 0, f"{self!r}: more shares ended than began"
        self.num_shares = num_left
        if not num_left:
            self.pool.last_share(self)

    def move(self, to: ExtentState) -> None:
        """Change the state (called by its pool). Raises `BadTransition` unless the table allows it."""
        # The table is slow to ask: this is the way of nearly all.
        is_common = to is CACHED and self.state is WRITING
        if not is_common and to not in EXTENT_TRANSITIONS[self.state]:
            raise BadTransition(f"{self!r} cannot become {to.name}")
        self.state = to
