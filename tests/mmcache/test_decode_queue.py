"""The line in front of the decoders."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmcache.server.decode_queue import DecodeQueue


def filled(flows: list[int]) -> DecodeQueue[tuple[int, int]]:
    queue: DecodeQueue[tuple[int, int]] = DecodeQueue()
    for number, flow in enumerate(flows):
        queue.push((number, flow), flow, 1.0, 1.0)
    return queue


@given(st.lists(st.integers(0, 4), max_size=40), st.data())
def test_each_flow_in_order_and_the_flows_in_turn(flows: list[int], data: st.DataObject) -> None:
    queue = filled(flows)
    left = {place for place in range(len(flows)) if data.draw(st.booleans())}
    for place in left:
        queue.remove((place, flows[place]))
    staying = [place for place in range(len(flows)) if place not in left]
    assert len(queue) == len(staying)
    popped = [queue.pop() for _ in staying]
    for flow in set(flows):
        assert [item for item in popped if item[1] == flow] == [(p, flow) for p in staying if flows[p] == flow]
    rank_in_flow = [sum(flows[p] == flows[place] for p in staying if p < place) for place, _ in popped]
    assert rank_in_flow == sorted(rank_in_flow)


def test_an_empty_queue_and_strangers() -> None:
    queue = filled([1])
    with pytest.raises(KeyError):
        queue.remove((7, 7))
    assert queue.pop() == (0, 1)
    with pytest.raises(IndexError):
        queue.pop()
    assert len(queue) == 0
