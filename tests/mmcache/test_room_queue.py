"""The queue for room: who is next, whatever comes and goes meanwhile."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from mmcache.server.room import Place, RoomQueue


def order_of(queue: RoomQueue[str]) -> list[str]:
    return [place.owner for place in queue]


def test_calls_come_in_the_order_of_their_arrival() -> None:
    queue: RoomQueue[str] = RoomQueue()
    assert queue.head is None
    late = queue.enter("late", 2)
    assert late.is_head
    early = queue.enter("early", 1)
    queue.enter("early too", 1)
    assert order_of(queue) == ["early", "early too", "late"]
    assert early.is_head
    assert not late.is_head
    queue.enter("taken back", 1, has_precedence=True)
    queue.enter("of a later call", 3, has_precedence=True)
    assert order_of(queue) == ["taken back", "early", "early too", "late", "of a later call"]


def test_a_place_moves_with_those_who_want_it() -> None:
    queue: RoomQueue[str] = RoomQueue()
    first, second = queue.enter("first", 1), queue.enter("second", 2)
    second.advance(3)
    assert first.is_head, "a later call that joins changes nothing"
    second.advance(0)
    assert second.is_head
    second.move(2)
    assert first.is_head, "the earlier call left"


def test_the_head_is_woken() -> None:
    async def waits(place: Place[str], seen: list[str]) -> None:
        while not place.is_head:
            await place.moved()
        seen.append(place.owner)

    async def run() -> list[str]:
        queue: RoomQueue[str] = RoomQueue()
        seen: list[str] = []
        places = {name: queue.enter(name, order) for order, name in enumerate("abc")}
        tasks = [asyncio.create_task(waits(place, seen)) for place in places.values()]
        await asyncio.sleep(0)
        queue.leave(places["a"])
        await tasks[1]
        places["c"].advance(0)
        await tasks[2]
        queue.leave(places["c"])
        queue.leave(places["b"])
        await tasks[0]
        return seen

    assert asyncio.run(asyncio.wait_for(run(), 30)) == ["a", "b", "c"]


def test_a_place_that_is_not_the_head_can_be_woken() -> None:
    async def run() -> None:
        queue: RoomQueue[str] = RoomQueue()
        queue.enter("head", 1)
        other = queue.enter("other", 2)
        task = asyncio.create_task(other.moved())
        await asyncio.sleep(0)
        assert not task.done()
        other.wake()
        await task

    asyncio.run(asyncio.wait_for(run(), 30))


steps = st.lists(
    st.tuples(st.sampled_from(["enter", "precede", "leave", "move"]), st.integers(0, 5), st.integers(0, 9))
)


@given(steps)
def test_whatever_comes_and_goes(taken: list[tuple[str, int, int]]) -> None:
    """Against a list that is sorted anew each time."""
    queue: RoomQueue[int] = RoomQueue()
    places: dict[Place[int], tuple[int, int, int]] = {}
    for owner, (what, order, which) in enumerate(taken):
        if what in ("enter", "precede"):
            place = queue.enter(owner, order, has_precedence=what == "precede")
            places[place] = (order, int(what == "enter"), owner)
        elif places:
            place = list(places)[which % len(places)]
            if what == "leave":
                queue.leave(place)
                del places[place]
            else:
                place.move(order)
                places[place] = (order, *places[place][1:])
        expected = sorted(places, key=lambda place: places[place])
        assert list(queue) == expected
        assert list(reversed(queue)) == expected[::-1]
        assert queue.head is (expected[0] if expected else None)
        assert len(queue) == len(expected)
