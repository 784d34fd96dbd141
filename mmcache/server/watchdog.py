"""Notices a process that makes no progress with what it was asked to do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

TICK_S = 0.25
"""The clock of all that is watched: a hang is noticed up to three of these late, never early."""

Lane: TypeAlias = str
Limit: TypeAlias = Callable[[], float]


@dataclass(slots=True)
class _Jobs:
    """What one lane has not answered, in the order in which it was asked, and since when nothing was answered."""

    unanswered: dict[int, tuple[str, Limit]] = field(default_factory=dict)
    waited_s: float = 0.0

    def restart(self) -> None:
        self.waited_s = -2 * TICK_S  # the tick that is under way began earlier


class Watchdog:
    """Watches a process that answers what it is asked; `on_hang` is told, once, of what it did not answer in time.

    What is asked in one lane is done one after the other: each answer gives what comes next its whole time. Time in
    which this process itself stood still, as under SIGSTOP or with its whole group frozen, counts as one tick.
    """

    def __init__(self, on_hang: Callable[[str], None]) -> None:
        self._on_hang = on_hang
        self._loop = asyncio.get_running_loop()
        self._lanes: dict[Lane, _Jobs] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._ticked_s = 0.0
        self._is_over = False

    def asked(self, lane: Lane, job: int, what: str, limit_s: Limit) -> None:
        """The process was asked for `what`, for people; `limit_s` says how long it may take, when that matters."""
        jobs = self._lanes.get(lane)
        if jobs is None:
            jobs = self._lanes[lane] = _Jobs()
        if not jobs.unanswered:
            jobs.restart()
        jobs.unanswered[job] = what, limit_s
        if self._timer is None and not self._is_over:
            self._ticked_s = self._loop.time()
            self._timer = self._loop.call_later(TICK_S, self._tick)

    def answered(self, lane: Lane, job: int) -> None:
        """It answered."""
        jobs = self._lanes[lane]
        del jobs.unanswered[job]
        jobs.restart()

    def stop(self) -> None:
        """The process is dead, or given up: watch no more."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = None
        now = self._loop.time()
        passed_s, self._ticked_s = min(now - self._ticked_s, 2 * TICK_S), now
        busy = [jobs for jobs in self._lanes.values() if jobs.unanswered]
        for jobs in busy:
            jobs.waited_s += passed_s
            what, limit_s = next(iter(jobs.unanswered.values()))
            if jobs.waited_s > (limit := limit_s()):
                self.stop()
                self._on_hang(f"it did not {what} within {limit:.3g} s")
                return
        if busy:
            self._timer = self._loop.call_later(TICK_S, self._tick)
