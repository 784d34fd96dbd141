"""The line of what waits for a decoder: flows in turn, so that one with many items keeps no other waiting."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class DecodeQueue(Generic[T]):
    """Items of several flows: each flow in the order of arrival, the flows one item at a turn.

    It has the methods of a fair queue of weighted flows, which can stand in its place; weight and cost are of no
    account here.
    """

    def __init__(self) -> None:
        self._flows: dict[Hashable, dict[T, None]] = {}  # in the order of their turns
        self._flow_of: dict[T, Hashable] = {}

    def __len__(self) -> int:
        return len(self._flow_of)

    def push(self, item: T, flow: Hashable, weight: float, cost: float) -> None:  # noqa: ARG002
        """One more item, which is not in the queue, at the end of its flow. `weight` and `cost` are positive."""
        self._flows.setdefault(flow, {})[item] = None
        self._flow_of[item] = flow

    def pop(self) -> T:
        """Take the next item.

        Raises:
            IndexError: there is none.
        """
        if not self._flows:
            raise IndexError("pop from an empty queue")
        flow = next(iter(self._flows))
        items = self._flows.pop(flow)
        item = next(iter(items))
        del items[item], self._flow_of[item]
        if items:
            self._flows[flow] = items
        return item

    def remove(self, item: T) -> None:
        """Take an item out of turn.

        Raises:
            KeyError: it is not in the queue.
        """
        flow = self._flow_of.pop(item)
        items = self._flows[flow]
        del items[item]
        if not items:
            del self._flows[flow]
