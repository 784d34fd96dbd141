"""Who waits for room in the pool, and whose turn it is: whoever asked first, however small a later one is.

Knows places in a queue; no pool, no requests. One thread, the coordinator's, uses it.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, TypeVar

Owner = TypeVar("Owner")


class Place(Generic[Owner]):
    """A place in the queue. Made by `RoomQueue.enter`.

    Attributes:
        owner: who waits.
        order: of the arrival of the earliest call that wants what `owner` waits for; the least is first.
    """

    __slots__ = ("_arrival", "_moved", "_queue", "_rank", "order", "owner")

    def __init__(self, queue: RoomQueue[Owner], owner: Owner, order: int, rank: int, arrival: int) -> None:
        self.owner = owner
        self.order = order
        self._queue = queue
        self._rank = rank
        self._arrival = arrival
        self._moved = asyncio.Event()

    @property
    def rank(self) -> tuple[int, int, int]:
        """What places are sorted by."""
        return self.order, self._rank, self._arrival

    @property
    def is_head(self) -> bool:
        """Whether it is this one's turn."""
        return self._queue.head is self

    def move(self, order: int) -> None:
        """Other calls want it now: the earliest of them has this order."""
        if order != self.order:
            self._queue.remove(self)
            self.order = order
            self._queue.insert(self)

    def advance(self, order: int) -> None:
        """One more call wants it."""
        if order < self.order:
            self.move(order)

    def wake(self) -> None:
        """Let `moved` return: there is something to look at."""
        self._moved.set()

    async def moved(self) -> None:
        """Wait until it may be this one's turn, or it was woken."""
        self._moved.clear()
        await self._moved.wait()


class RoomQueue(Generic[Owner]):
    """Places in the order of their calls' arrival; of one call those with precedence first, then as they came."""

    def __init__(self) -> None:
        self._places: list[Place[Owner]] = []
        self._num_entered = 0

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Place[Owner]]:
        return iter(self._places)

    def __reversed__(self) -> Iterator[Place[Owner]]:
        return reversed(self._places)

    @property
    def head(self) -> Place[Owner] | None:
        """Whose turn it is."""
        return self._places[0] if self._places else None

    def enter(self, owner: Owner, order: int, *, has_precedence: bool = False) -> Place[Owner]:
        """Queue up; `has_precedence` over other places of the same order. `leave` ends it."""
        self._num_entered += 1
        place = Place(self, owner, order, 0 if has_precedence else 1, self._num_entered)
        self.insert(place)
        return place

    def leave(self, place: Place[Owner]) -> None:
        """The wait is over."""
        self.remove(place)
        if self._places:
            self._places[0].wake()

    def insert(self, place: Place[Owner]) -> None:
        """Put a place where it belongs (called by it)."""
        insort(self._places, place, key=_rank)
        self._places[0].wake()

    def remove(self, place: Place[Owner]) -> None:
        """Take a place out (called by it)."""
        index = bisect_left(self._places, place.rank, key=_rank)
        assert self._places[index] is place, "it is in the queue, under its rank"
        del self._places[index]


def _rank(place: Place[Owner]) -> tuple[int, int, int]:
    return place.rank
