"""How long a rank that has just finished waits for what is about to be ready, so that it begins one batch, not two."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmcache.server.batcher import Batcher


class Announcement:
    """An item whose pixels are on their way. Says how many patches it will have, and that it has come or will not."""

    __slots__ = ("_of", "_patches")

    def __init__(self, of: FillWait) -> None:
        self._of = of
        self._patches = 0

    def sized(self, num_patches: int) -> None:
        """Its size is known."""
        self._of.num_patches += num_patches - self._patches
        self._patches = num_patches

    def withdraw(self) -> None:
        """It is ready, or it failed. May be said again."""
        if self._patches:
            self.sized(0)
            self._of.on_withdrawn()


class FillWait:
    """Bounds and counts such waits. A rank that has nothing to do never waits with what comes.

    Attributes:
        num_patches: announced and not ready.
        num_waits: microbatches that waited.
        on_withdrawn: told that fewer are announced than were.
    """

    def __init__(self, wait_s: float, on_withdrawn: Callable[[], None]) -> None:
        self._wait_s = wait_s
        self._timers: dict[Batcher, asyncio.TimerHandle] = {}
        self._loop = asyncio.get_running_loop()
        self.num_patches = 0
        self.num_waits = 0
        self.on_withdrawn = on_withdrawn

    def holds(self, batcher: Batcher, num_ready: int, num_wanted: int) -> bool:
        """Whether a microbatch is to wait for more: `num_ready` patches are there of `num_wanted` that it could have.

        When the time is over, the batcher is pumped.
        """
        gains = self.num_patches > 0 and 0 < num_ready < num_wanted
        if (timer := self._timers.get(batcher)) is not None:
            if not gains:
                timer.cancel()
                del self._timers[batcher]
            return gains
        if not gains or not batcher.has_just_finished or self._wait_s <= 0:
            return False
        self._timers[batcher] = self._loop.call_later(self._wait_s, self._over, batcher)
        self.num_waits += 1
        return True

    def _over(self, batcher: Batcher) -> None:
        del self._timers[batcher]
        batcher.pump()
