"""Whose work something is, and what share of the decoders and ranks that one has."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

from mmcache.records import PRIORITIES

if TYPE_CHECKING:
    from mmcache.server.flight import Flight

INTERACTIVE, BULK = 0, 1
CLASSES = PRIORITIES
"""Names of the priorities, by code."""
WEIGHTS = (8.0, 1.0)
"""Shares of a flow by its priority."""


class Flow(NamedTuple):
    """What one client asks for at one priority."""

    owner: Hashable
    priority: int = INTERACTIVE

    @property
    def weight(self) -> float:
        """Its share against other flows."""
        return WEIGHTS[self.priority]


def flow_of(flight: Flight) -> Flow:
    """Of the first who waits for a flight, before all of lower priority. It has waiters."""
    for request, _ in flight.waiters:
        if request.priority == INTERACTIVE:
            return Flow(request.connection, INTERACTIVE)
    first, _ = next(iter(flight.waiters))
    return Flow(first.connection, first.priority)
