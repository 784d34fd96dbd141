"""How long a process has been at one item: too long for those behind it, or too long at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

STALL_S = 0.2
"""Of one item. What lies behind it in the process can then go to another."""


class Watchdog:
    """Calls `on_stall` every `STALL_S` that an item takes, and `on_timeout` once it has taken `timeout_s`.

    Attributes:
        is_stalled: the item at work has taken longer than `STALL_S`.
    """

    def __init__(self, timeout_s: float, on_stall: Callable[[], None], on_timeout: Callable[[], None]) -> None:
        self._timeout_s = timeout_s
        self._on_stall = on_stall
        self._on_timeout = on_timeout
        self._loop = asyncio.get_running_loop()
        self._since_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.is_stalled = False

    def begin(self) -> None:
        """An item is begun; the one before it is done."""
        self.is_stalled = False
        self._since_s = self._loop.time()
        if self._timer is None:  # an older one comes too early, and looks again
            self._look_in(STALL_S)

    def rest(self) -> None:
        """Nothing is at work."""
        self.is_stalled = False
        self._since_s = None

    def _look_in(self, seconds: float) -> None:
        assert self._since_s is not None, "an item is at work"
        now = self._loop.time()
        self._timer = self._loop.call_at(min(now + seconds, self._since_s + self._timeout_s), self._look)

    def _look(self) -> None:
        self._timer = None
        if self._since_s is None:
            return
        seconds = self._loop.time() - self._since_s
        if seconds >= self._timeout_s:
            self.rest()
            self._on_timeout()
        elif seconds < STALL_S:
            self._look_in(STALL_S - seconds)
        else:
            self.is_stalled = True
            self._look_in(STALL_S)
            self._on_stall()
