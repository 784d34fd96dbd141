"""How long a client may take to send the bytes it was asked for, before another one that waits for them is asked."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from mmcache.server.flight import Flight

SUPPLY_PATIENCE_S = 1.0
"""A client that has not sent bytes after this long is asked no longer alone, if another client waits for them too."""


class Patience:
    """Everything that clients were asked for, in the order in which it was: one timer for all of it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._asked: deque[tuple[float, Flight, asyncio.Future[Any]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, flight: Flight, supplied: asyncio.Future[Any]) -> None:
        """The first waiter of a flight was asked; `supplied` is done when it answers.

        It is None when there is another client to ask: then that one is the first waiter.
        """
        asked = self._asked
        while asked and asked[0][2].done():
            asked.popleft()
        self._add(flight, supplied)

    def _add(self, flight: Flight, supplied: asyncio.Future[Any]) -> None:
        due_s = self._loop.time() + SUPPLY_PATIENCE_S
        self._asked.append((due_s, flight, supplied))
        if self._timer is None:
            self._timer = self._loop.call_at(due_s, self._look)

    def _look(self) -> None:
        self._timer = None
        asked, now = self._asked, self._loop.time()
        late: list[tuple[Flight, asyncio.Future[Any]]] = []
        while asked and (asked[0][2].done() or asked[0][0] <= now):
            _, flight, supplied = asked.popleft()
            if not supplied.done():
                late.append((flight, supplied))
        if asked:
            self._timer = self._loop.call_at(asked[0][0], self._look)
        for flight, supplied in late:
            if flight.pass_on():
                supplied.set_result(None)
            else:
                self._add(flight, supplied)
