"""What tests lease instead of a pool's extents, and a clock that they set."""

from __future__ import annotations

from ipc.errors import BadTransition


class Thing:
    """Something leased: it counts its shares, and may refuse them."""

    nbytes = 1000

    def __init__(self, leasable: bool = True) -> None:
        self.leasable = leasable
        self.num_shares = 0
        self.last_granted = -1.0

    def share_granted(self, now: float) -> None:
        if not self.leasable:
            raise BadTransition("not cached")
        self.num_shares += 1
        self.last_granted = now

    def share_ended(self) -> None:
        self.num_shares -= 1


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now
