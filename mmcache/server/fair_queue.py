"""A queue in which nobody waits for a stranger: start-time fair queueing.

Each flow gets its share of the service by its weight, whatever it has queued: a flow of one item is served next after
what is due, not behind five hundred items of another. Source: Goyal, Vin, Cheng, "Start-time Fair Queueing", 1996.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_IDLE_FLOWS = 1024
"""Flows without items are forgotten beyond this many, once they have nothing to make up for."""


@dataclass(slots=True, eq=False)
class Ticket(Generic[T]):
    """An item's place in the queue. `cost`: what its service takes; `is_queued`: not taken and not removed yet."""

    item: T
    cost: float
    flow: _Flow[T]
    is_queued: bool = True


@dataclass(slots=True, eq=False)
class _Flow(Generic[T]):
    """What one flow has queued, in order. `start`: virtual time at which its next item is due."""

    weight: float
    start: float
    order: int
    tickets: dict[Ticket[T], None] = field(default_factory=dict)


class FairQueue(Generic[T]):
    """Items by flow. A flow that had nothing queued has saved nothing up, and owes what it was served in advance."""

    def __init__(self) -> None:
        self._flows: dict[tuple[Hashable, float], _Flow[T]] = {}
        self._active: set[_Flow[T]] = set()
        self._now = self._latest = 0.0
        self._num_queued = 0
        self._num_flows = 0

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
        due = [(flow.start, flow.order, flow, iter(flow.tickets)) for flow in self._active]
        heapq.heapify(due)
        while due:
            start, order, flow, tickets = due[0]
            if (ticket := next(tickets, None)) is None:
                heapq.heappop(due)
            else:
                heapq.heapreplace(due, (start + ticket.cost / flow.weight, order, flow, tickets))
                yield ticket

    def take(self, ticket: Ticket[T]) -> T:
        """Serve an item, also one that is not the next: its flow is charged for it."""
        flow = ticket.flow
        self._now = max(self._now, flow.start)
        flow.start += ticket.cost / flow.weight
        self._latest = max(self._latest, flow.start)
        self.remove(ticket)
        return ticket.item

    def remove(self, ticket: Ticket[T]) -> None:
        """An item leaves unserved; its flow is not charged. What has left already is ignored."""
        if not ticket.is_queued:
            return
        ticket.is_queued = False
        self._leave(ticket)
        self._num_queued -= 1
        if not self._num_queued:  # a busy period is over: nobody is ahead of anybody
            self._now = self._latest
            self._flows.clear()

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
        flow.tickets[ticket] = None

    def _leave(self, ticket: Ticket[T]) -> None:
        del ticket.flow.tickets[ticket]
        if not ticket.flow.tickets:
            self._active.discard(ticket.flow)

    def _forget(self) -> None:
        if len(self._flows) - len(self._active) > MAX_IDLE_FLOWS:
            self._flows = {key: flow for key, flow in self._flows.items() if flow.tickets or flow.start > self._now}
