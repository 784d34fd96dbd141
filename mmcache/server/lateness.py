"""What a client is told of what was not done by its deadline."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from ipc.leases import Holder
from mmcache.errors import DeadlineExceeded, ItemError, NoRanks, PoolExhausted
from mmcache.server.flight import Flight
from mmcache.server.stats import biggest_holders

if TYPE_CHECKING:
    from mmcache.server.coordinator import Coordinator


def late_errors(home: Coordinator, asker: Holder) -> Callable[[Flight], ItemError]:
    """Gives the error of each position that is open at its request's deadline; looks for the holders once."""
    holders = functools.cache(lambda: biggest_holders(home, asker))

    def late_error(flight: Flight) -> ItemError:
        if not home.ranks.ready:
            why = home.ranks.outage or "it was waiting for one at the deadline"
            return NoRanks(f"no rank is alive that could encode it: {why}")
        if flight.place is not None:
            return PoolExhausted(f"the pool had no room until the deadline; held by {holders()}")
        return DeadlineExceeded(f"the deadline passed while it was {flight.stage}")

    return late_error
