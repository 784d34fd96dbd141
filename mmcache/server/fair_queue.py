"""A queue in which nobody waits for a stranger: start-time fair queueing.

Each flow gets its share of the service by its weight, whatever it has queued: a flow of one item is served next after
what is due, not behind five hundred items of another. Source: Goyal, Vin, Cheng, "Start-time Fair Queueing", 1996.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

T = TypeVar("T")

MAX_IDLE_FLOWS = 1024
"""Flows without items are forgotten beyond this many, once they have nothing to make up for."""

MAX_STALE = 64


@dataclass(slots=True, eq=False)
class Ticket(Generic[T]):
    """An item's place in the queue. `cost`: what its service takes; `is_queued`: not taken and not removed yet."""

    item: T
    cost: float
    flow: _Flow[T]
    is_queued: bool = True


@dataclass(slots=True, eq=False)
class _Flow(Generic[T]):
    """What one flow has queued, in order. `start`: virtual time at which its next item is due.

    `entry`: its place in the heap of flows; None while nothing is queued.
    """

    weight: float
    start: float
    order: int
    entry: _Entry[T] | None = None
    tickets: dict[Ticket[T], None] = field(default_factory=dict)


_Entry: TypeAlias = "tuple[float, int, int, _Flow[T]]"
"""Start and order of a flow, and a number that no other entry has. One that its flow has replaced is stale."""


class FairQueue(Generic[T]):
    """Items by flow. A flow that had nothing queued has saved nothing up, and owes what it was served in advance.

    Every operation takes logarithmic time, and so does each step of `ahead`, however much is queued.
    """

    def __init__(self) -> None:
        self._flows: dict[tuple[Hashable, float], _Flow[T]] = {}
        self._active: set[_Flow[T]] = set()
        self._now = self._latest = 0.0
        self._num_queued = 0
        self._num_flows = self._num_entries = 0
        self._heap: list[_Entry[T]] = []
        self._forget_above = MAX_IDLE_FLOWS

    def __len__(self) -> int:
        return self._num_queued

    def put(self, item: T, flow: Hashable, weight: float, cost: float) -> Ticket[T]:
        """Queue an item behind those of its flow. A flow has one weight; another weight is another flow."""
        if weight <= 0 or cost < 0:
            raise ValueError(f"weight must be positive and cost not negative, got {weight} and {cost}")
        ticket = Ticket(item, cost, self._flow(flow, weight))
        self._enter(ticket)
        self._num_queued += 1
        return ticket

    def move(self, ticket: Ticket[T], flow: Hashable, weight: float) -> None:
        """Put an item behind those of another flow; its own is not charged. What has left already is ignored."""
        if weight <= 0:
            raise ValueError(f"weight must be positive, got {weight}")
        if not ticket.is_queued or (target := self._flow(flow, weight)) is ticket.flow:
            return
        self._leave(ticket)
        ticket.flow = target
        self._enter(ticket)

    def ahead(self) -> Iterator[Ticket[T]]:
        """Tickets in the order in which they are due; nothing is taken. The queue may not change meanwhile."""
        self._tidy()
        if len(self._active) == 1:
            (only,) = self._active
            yield from only.tickets
            return
        heap = self._heap
        # What is to be looked at next: flows, and places of the heap, under which all is due later.
        due: list[tuple[float, int, int, Iterator[Ticket[T]] | None]] = []

        def push_place(place: int) -> None:
            if place < len(heap):
                heapq.heappush(due, (*heap[place][:2], place, None))

        push_place(0)
        while due:
            start, order, place, tickets = heapq.heappop(due)
            if tickets is None:
                flow = heap[place][3]
                if flow.entry is heap[place]:
                    heapq.heappush(due, (start, order, -1, iter(flow.tickets)))
                push_place(2 * place + 1)
                push_place(2 * place + 2)
            elif (ticket := next(tickets, None)) is not None:
                yield ticket
                heapq.heappush(due, (start + ticket.cost / ticket.flow.weight, order, -1, tickets))

    def take(self, ticket: Ticket[T]) -> T:
        """Serve an item, also one that is not the next: its flow is charged for it."""
        flow = ticket.flow
        self._now = max(self._now, flow.start)
        flow.start += ticket.cost / flow.weight
        self._latest = max(self._latest, flow.start)
        self._activate(flow)
        self.remove(ticket)
        return ticket.item

    def take_all(self, tickets: Sequence[Ticket[T]]) -> None:
        """Serve several items, as `take` does one after the other."""
        touched: dict[_Flow[T], None] = {}
        for ticket in tickets:
            flow = ticket.flow
            self._now = max(self._now, flow.start)
            flow.start += ticket.cost / flow.weight
            self._latest = max(self._latest, flow.start)
            ticket.is_queued = False
            del flow.tickets[ticket]
            touched[flow] = None
        self._num_queued -= len(tickets)
        for flow in touched:
            if flow.tickets:
                self._activate(flow)
            else:
                self._active.discard(flow)
                flow.entry = None
        self._end_if_empty()

    def remove(self, ticket: Ticket[T]) -> None:
        """An item leaves unserved; its flow is not charged. What has left already is ignored."""
        if not ticket.is_queued:
            return
        ticket.is_queued = False
        self._leave(ticket)
        self._num_queued -= 1
        self._end_if_empty()

    def _end_if_empty(self) -> None:
        if not self._num_queued:  # a busy period is over: nobody is ahead of anybody
            self._now = self._latest
            self._flows.clear()
            self._heap.clear()

    def _flow(self, flow: Hashable, weight: float) -> _Flow[T]:
        found = self._flows.get((flow, weight))
        if found is None:
            self._forget()
            self._num_flows += 1
            found = self._flows[flow, weight] = _Flow(weight, self._now, self._num_flows)
        return found

    def _enter(self, ticket: Ticket[T]) -> None:
        flow = ticket.flow
        if not flow.tickets:
            flow.start = max(flow.start, self._now)
            self._active.add(flow)
            self._activate(flow)
        flow.tickets[ticket] = None

    def _leave(self, ticket: Ticket[T]) -> None:
        del ticket.flow.tickets[ticket]
        if not ticket.flow.tickets:
            self._active.discard(ticket.flow)
            ticket.flow.entry = None

    def _activate(self, flow: _Flow[T]) -> None:
        self._num_entries += 1
        flow.entry = (flow.start, flow.order, self._num_entries, flow)
        heapq.heappush(self._heap, flow.entry)

    def _tidy(self) -> None:
        """Drop stale entries: those at the top, and all when they are too many."""
        heap = self._heap
        if len(heap) > 2 * len(self._active) + MAX_STALE:
            heap[:] = [flow.entry for flow in self._active if flow.entry is not None]
            heapq.heapify(heap)
        while heap and heap[0][3].entry is not heap[0]:
            heapq.heappop(heap)

    def _forget(self) -> None:
        if len(self._flows) - len(self._active) > self._forget_above:
            self._flows = {key: flow for key, flow in self._flows.items() if flow.tickets or flow.start > self._now}
            self._forget_above = max(MAX_IDLE_FLOWS, 2 * (len(self._flows) - len(self._active)))
