"""Items that the sidecar refused because it has too much queued, and when a call asks for them again."""

from __future__ import annotations

import math
import random
import time
from typing import NamedTuple

from mmcache.errors import Overloaded
from mmcache.parts import Part
from mmcache.pending import PendingEncode

LEAST_PAUSE_S = 0.05
"""Taken for a hint that says less."""
GROWTH = 2.0
MAX_RETRIES = 100


class _Waiting(NamedTuple):
    at: float
    part: Part


class Retries:
    """What of one call is to be asked for again. It lies here until its new request has begun.

    Nothing here is locked: `refused` and `began` are for whoever has the connection, `due` for whoever cuts the call.
    """

    def __init__(self, num_retries: int, deadline: float) -> None:
        """At most so many times each item, and before the deadline, on the monotonic clock."""
        self._num_retries = num_retries
        self._deadline = deadline
        self._waiting: list[_Waiting] = []
        self._seen: set[tuple[int, int]] = set()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def next_at(self) -> float:
        """When the next of them is due, on the monotonic clock; infinite if there is none."""
        return min((waiting.at for waiting in self._waiting), default=math.inf)

    @property
    def is_due(self) -> bool:
        """Whether one is."""
        return self.next_at <= time.monotonic()

    def refused(self, request: PendingEncode) -> None:
        """A request is settled: what of it was refused waits, if it has tries left and the deadline is later."""
        if not request.has_failed or request.part.attempt >= self._num_retries:
            return
        hints: dict[int, float] = {}
        for position, result in enumerate(request.results):
            if isinstance(result, Overloaded) and (request.request_id, position) not in self._seen:
                hints[position] = result.retry_after_s
        if not hints:
            return
        at = time.monotonic() + pause_s(max(hints.values()), request.part.attempt)
        if at < self._deadline:
            self._seen.update((request.request_id, position) for position in hints)
            self._waiting.append(_Waiting(at, request.part.again(list(hints))))

    def due(self) -> Part | None:
        """A part that is to be asked for by now."""
        now = time.monotonic()
        return next((waiting.part for waiting in self._waiting if waiting.at <= now), None)

    def began(self, part: Part) -> None:
        """It was asked for."""
        self._waiting[:] = [waiting for waiting in self._waiting if waiting.part is not part]

    def clear(self) -> None:
        """The call is over."""
        self._waiting.clear()


def check_retries(retry_overloaded: int) -> int:
    """A user's number of retries. Raises ValueError if it is out of range."""
    if isinstance(retry_overloaded, bool) or not 0 <= retry_overloaded <= MAX_RETRIES:
        raise ValueError(f"retry_overloaded must be 0 to {MAX_RETRIES}, got {retry_overloaded!r}")
    return retry_overloaded


def pause_s(hint_s: float, attempt: int) -> float:
    """How long to wait after `attempt` retries that were refused too: random, so that clients do not come all at once.

    Between half and one and a half of the sidecar's hint, doubled with each retry.
    """
    return max(hint_s, LEAST_PAUSE_S) * GROWTH**attempt * random.uniform(0.5, 1.5)  # noqa: S311
