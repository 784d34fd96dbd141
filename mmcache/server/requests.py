"""One request in flight, and one flight of a key that no tier had."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mmcache.errors import ItemError
from mmcache.protocol import GRANT_HEAD, KEY_BYTES, RESULTS_HEAD, Kind, Unsettled, pack_frame

if TYPE_CHECKING:
    from ipc.leases import Holder, Share
    from ipc.pool import Extent
    from mmcache.server.connection import Connection
    from mmcache.server.decoders import Supplied

SUPPLY_WINDOW = 32
"""Items of one request whose bytes are asked for at once: bounds what a request of large files holds in memory."""


class Flight:
    """The way of one key from miss to embedding, however many positions of however many requests wait for it.

    Attributes:
        waiters: (request, position), in the order of their arrival. A flight without waiters is given up before
            its next stage.
        stage: what it waits for, for error messages.
        waits_for_room: whether that is room in the pool.
        supplied: while the first waiter's client is asked for the bytes: gives them, or None if it will not send them.
    """

    __slots__ = ("key", "stage", "supplied", "waiters", "waits_for_room")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.waiters: list[tuple[Request, int]] = []
        self.stage = "looked up"
        self.waits_for_room = False
        self.supplied: asyncio.Future[Supplied | None] | None = None

    def join(self, request: Request, position: int) -> None:
        """One more position waits."""
        self.waiters.append((request, position))
        request.open[position] = self

    def leave(self, request: Request, position: int) -> None:
        """A position waits no longer."""
        asked = self.waiters[:1]
        self.waiters.remove((request, position))
        if self.waiters[:1] != asked:
            self.supply(None)

    def supply(self, supplied: Supplied | None) -> bool:
        """Settle the question for bytes. False when nobody asked."""
        if self.supplied is None or self.supplied.done():
            return False
        self.supplied.set_result(supplied)
        return True

    def fail(self, error: ItemError) -> None:
        """Every waiter gets the error."""
        for request, position in self.waiters:
            request.fail(position, error)
        self.waiters = []


class Request:
    """One encode request of one connection: what is settled is sent in as few frames as the loop's turns allow.

    Attributes:
        keys: content keys by position.
        open: the flight of every position that is not settled.
    """

    __slots__ = (
        "_errors", "_failed", "_flush_due", "_granted", "_need", "_reasons", "_timer",
        "_window", "connection", "deadline",
        "holder", "keys", "open", "request_id",
    )  # fmt: skip

    def __init__(self, connection: Connection, holder: Holder, request_id: int, keys: bytes, timeout_s: float) -> None:
        self.connection = connection
        self.holder = holder
        self.request_id = request_id
        self.keys: tuple[bytes, ...] = struct.unpack(f"{KEY_BYTES}s" * (len(keys) // KEY_BYTES), keys)
        self.open: dict[int, Flight] = {}
        self.deadline = asyncio.get_running_loop().time() + timeout_s
        self._granted: list[Any] = []
        self._need: list[int] = []
        self._failed: list[int] = []
        self._errors: list[str] = []
        self._reasons: list[str] = []
        self._flush_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._window: asyncio.Semaphore | None = None

    @property
    def window(self) -> asyncio.Semaphore:
        """Bounds the items whose bytes are asked for at once."""
        self._window = self._window or asyncio.Semaphore(SUPPLY_WINDOW)
        return self._window

    def send_grant(self, position: int, share: Share, extent: Extent, origin: int) -> None:
        """A position has its lease. The extent was published with its half of the record (`GRANT_EXTENT`)."""
        self._granted += (GRANT_HEAD.pack(position, share.slot, share.generation, origin), extent.info)
        if self.open and self.open.pop(position, None) is not None:
            self._flush_soon()

    def fail(self, position: int, error: ItemError) -> None:
        """A position has its error."""
        self._failed.append(position)
        self._errors.append(type(error).__name__)
        self._reasons.append(error.reason[:2000])
        self.connection.count_error(type(error).__name__)
        if self.open.pop(position, None) is not None:
            self._flush_soon()

    def ask(self, position: int) -> None:
        """Ask the client for the bytes of a position."""
        self._need.append(position)
        self._flush_soon()

    def flush(self) -> None:
        """Send what is settled or asked for since the last time."""
        self._flush_due = False
        more = None
        if self._failed or self._need:
            more = Unsettled(need=self._need, failed=self._failed, errors=self._errors, reasons=self._reasons)
            self._need, self._failed, self._errors, self._reasons = [], [], [], []
        if self._granted or more is not None:
            body = b"".join((RESULTS_HEAD.pack(self.request_id), *self._granted))
            self._granted.clear()
            self.connection.send(pack_frame(Kind.RESULTS, more, body))
        if not self.open:
            self._finish()

    def wait(self) -> None:
        """Something is left open: give it its time."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(self.deadline, self._expire)

    def cancel(self, positions: Sequence[int]) -> None:
        """Nobody wants these positions any more; all that are open, if none are named."""
        for position in positions or list(self.open):
            flight = self.open.pop(position, None)
            if flight is not None:
                flight.leave(self, position)
        if not self.open:
            self._finish()

    def _expire(self) -> None:
        late, self.open = self.open, {}
        for position, flight in late.items():
            error = self.connection.late_error(flight)
            flight.leave(self, position)
            self.fail(position, error)
        self.flush()

    def _flush_soon(self) -> None:
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self.flush)

    def _finish(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.connection.finished(self)
