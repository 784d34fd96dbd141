"""How late the coordinator's loop is: whatever holds it up holds every client up."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from mmcache.histograms import FAST_S, Histogram

PERIOD_S = 0.02
NUM_SAMPLES = 3000
"""The last minute's."""


class LoopLag:
    """Asks the loop for a turn again and again, and notes how much later than asked it comes.

    Attributes:
        seconds: of every turn since the start.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._late_s: deque[float] = deque(maxlen=NUM_SAMPLES)
        self._due_s = 0.0
        self.seconds = Histogram(FAST_S)

    def start(self) -> None:
        """From now on, as long as the loop runs."""
        self._due_s = time.monotonic() + PERIOD_S  # the loop's own clock counts milliseconds
        self._loop.call_later(PERIOD_S, self._turn)

    def _turn(self) -> None:
        late_s = max(0.0, time.monotonic() - self._due_s)
        self._late_s.append(late_s)
        self.seconds.observe(late_s)
        self.start()

    def counters(self) -> dict[str, float]:
        """Milliseconds over the last minute, for `mmcache stats`; zeros before the first turn."""
        late = sorted(self._late_s) or [0.0]
        return {
            "p50_ms": _milliseconds(late, 0.5),
            "p99_ms": _milliseconds(late, 0.99),
            "max_ms": _milliseconds(late, 1.0),
        }


def _milliseconds(late: list[float], quantile: float) -> float:
    return round(late[min(len(late) - 1, int(len(late) * quantile))] * 1e3, 3)
