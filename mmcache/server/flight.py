"""One flight of a key that no tier had, and who waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from mmcache.errors import ItemError
from mmcache.server.flows import INTERACTIVE

if TYPE_CHECKING:
    from ipc.pool import Extent
    from mmcache.foreign import ForeignModel
    from mmcache.server.decoders import Supplied
    from mmcache.server.requests import Request
    from mmcache.server.room import Place

Waiter: TypeAlias = "tuple[Request, int]"
"""A position of a request."""


class AbandonedError(Exception):
    """Nobody waits for this flight any more."""


class Interruptible:
    """See `Flight.interrupted`."""

    __slots__ = ("_flight", "_is_abandoned", "_on_change", "_task")

    def __init__(self, flight: Flight, on_change: Callable[[], None] | None) -> None:
        task = asyncio.current_task()
        assert task is not None, "a flight is carried by a task"
        self._flight = flight
        self._on_change = on_change
        self._task = task
        self._is_abandoned = False

    def __enter__(self) -> None:
        self._flight.on_change = self._changed

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._flight.on_change = None
        is_cancelled = kind is not None and issubclass(kind, asyncio.CancelledError)
        if is_cancelled and self._is_abandoned and not self._task.uncancel():
            raise AbandonedError from None

    def _changed(self) -> None:
        if not self._flight.waiters:
            if not self._is_abandoned:
                self._is_abandoned = True
                self._task.cancel()
        elif self._on_change is not None:
            self._on_change()


class Flight:
    """The way of one key from miss to embedding, however many positions of however many requests wait for it.

    Attributes:
        key: the content key.
        namespace: `keys.namespace_id` of the namespace that the key belongs to.
        foreign: the model that it is of, if not of the served one: then nothing here can encode it.
        waiters: (request, position), in the order of their arrival. A flight without waiters is given up before
            its next stage.
        stage: what it waits for, for error messages.
        place: in the queue for room in the pool, while it waits for that.
        extent: where its embedding is written to, since it has room.
        on_change: called, where that is of use, when others wait for it than before, or nobody does.
        supplied: while a waiter's client is asked for the bytes: gives them and whose they are, or None if that
            client will not send them.
        looked_up_at: how many evictions had ended when a store was asked for it last.
    """

    __slots__ = (
        "extent", "foreign", "key", "looked_up_at", "namespace", "on_change", "place", "stage", "supplied", "waiters",
    )  # fmt: skip

    def __init__(self, key: bytes, namespace: bytes, foreign: ForeignModel | None = None) -> None:
        self.key = key
        self.foreign = foreign
        self.namespace = namespace
        self.waiters: dict[Waiter, None] = {}
        self.stage = "looked up"
        self.looked_up_at = 0
        self.place: Place[Flight] | None = None
        self.extent: Extent | None = None
        self.on_change: Callable[[], None] | None = None
        self.supplied: asyncio.Future[tuple[Waiter, Supplied] | None] | None = None

    @property
    def order(self) -> int:
        """Of the arrival of the earliest call that waits for it. It has waiters."""
        return min(request.call.order for request, _ in self.waiters)

    def join(self, request: Request, position: int) -> None:
        """One more position waits."""
        self.waiters[request, position] = None
        request.open[position] = self
        if self.place is not None:
            self.place.advance(request.call.order)
        if self.on_change is not None and request.priority == INTERACTIVE:
            self.on_change()

    def leave(self, request: Request, position: int) -> None:
        """A position waits no longer, if it did."""
        was_first = self.first() == (request, position)
        self.waiters.pop((request, position), None)
        if was_first:
            self._answer(None)
        is_other = was_first or not self.waiters or request.priority == INTERACTIVE
        if self.on_change is not None and is_other:
            self.on_change()
        if self.place is not None:
            if not self.waiters:
                self.place.wake()
            elif request.call.order == self.place.order:
                self.place.move(self.order)

    def first(self) -> Waiter | None:
        """Who is asked for the bytes next."""
        return next(iter(self.waiters), None)

    def pass_on(self) -> bool:
        """Put every position of the first waiter's connection behind the others'. False if there are no others."""
        first = self.first()
        if first is None:
            return False
        theirs = [waiter for waiter in self.waiters if waiter[0].connection is first[0].connection]
        if len(theirs) == len(self.waiters):
            return False
        for waiter in theirs:
            del self.waiters[waiter]
            self.waiters[waiter] = None
        return True

    def supply(self, request: Request, position: int, supplied: Supplied) -> bool:
        """Bytes came. False when they are not waited for any more."""
        return self._answer(((request, position), supplied))

    def fail(self, error: ItemError) -> None:
        """Every waiter gets the error, and waits no longer."""
        for request, position in list(self.waiters):
            self.leave(request, position)
            request.fail(position, error)

    def interrupted(self, on_change: Callable[[], None] | None = None) -> Interruptible:
        """Inside, what its task waits for is cancelled when its last waiter leaves; only around what may be.

        `on_change` is called when others wait for it than before.

        Raises:
            AbandonedError: that happened.
        """
        return Interruptible(self, on_change)

    def _answer(self, answer: tuple[Waiter, Supplied] | None) -> bool:
        if self.supplied is None or self.supplied.done():
            return False
        self.supplied.set_result(answer)
        return True
