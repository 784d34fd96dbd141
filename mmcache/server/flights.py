"""Single flight: one flight a key however many wait for it, and no more flights than the sidecar can carry."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mmcache.errors import NoRanks, Overloaded
from mmcache.server.flight import Flight

if TYPE_CHECKING:
    from mmcache.server.coordinator import Coordinator
    from mmcache.server.requests import Request


class Flights:
    """All flights that are under way. `max_flights`: beyond it none begins for those who come anew."""

    def __init__(self, coordinator: Coordinator, max_flights: int) -> None:
        self._home = coordinator
        self._max_flights = max_flights
        self._flights: dict[bytes, Flight] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def join(self, request: Request, misses: Sequence[int], *, has_waited: bool = False) -> list[Flight]:
        """Each missing position joins the flight of its key. Returns the flights that are new.

        What would need one beyond the bound, and has not waited before, fails; and all that would, without a rank.
        """
        flights = self._flights
        new: list[Flight] = []
        refused: list[int] = []
        outage = self._home.ranks.outage
        most = 0 if outage else sys.maxsize if has_waited else self._max_flights
        connection = request.connection
        for position in misses:
            key = request.keys[position]
            flight = flights.get(key)
            if flight is not None:
                self._home.stats.joined += 1
            elif len(flights) < most:
                flight = flights[key] = Flight(key, connection.namespace_id, connection.foreign)
                new.append(flight)
            else:
                refused.append(position)
                continue
            flight.join(request, position)
        if refused:
            error = _no_ranks(outage) if outage else self._overloaded(len(refused))
            for position in refused:
                request.fail(position, error)
        return new

    def end(self, flight: Flight) -> None:
        """A flight is over: the next miss of its key starts a new one."""
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]

    def end_outage(self) -> None:
        """Without a rank, and without hope of one, nothing that is under way is done."""
        if outage := self._home.ranks.outage:
            for flight in list(self._flights.values()):
                flight.fail(_no_ranks(outage))

    def _overloaded(self, num_items: int) -> Overloaded:
        retry_after_s = self._home.scheduler.seconds_for(num_items)
        bound = f"{self._max_flights} items are looked up, decoded or encoded, as many as may be (max_queued_items)"
        return Overloaded(f"{bound}; try again in {retry_after_s:.2f} s", retry_after_s)


def _no_ranks(outage: str) -> NoRanks:
    return NoRanks(f"no rank is alive that could encode it: {outage}")
