"""One request in flight."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

from mmcache.errors import ItemError, Overloaded
from mmcache.framing import Kind, pack_frame
from mmcache.protocol import MAX_RETRY_S, Recall, Unsettled
from mmcache.records import GRANT_HEAD, KEY_BYTES, RESULTS_HEAD, SUPPLY_WINDOW, EncodeFrame
from mmcache.server.settled import settled

if TYPE_CHECKING:
    from ipc.leases import Holder
    from ipc.pool import Extent
    from ipc.shares import Share
    from mmcache.server.calls import Call
    from mmcache.server.connection import Connection
    from mmcache.server.flight import Flight
    from mmcache.server.staged import StagedSlice


class Request:
    """One encode request of one connection: what is settled is sent in as few frames as the loop's turns allow.

    Attributes:
        keys: content keys by position, as the index has them.
        open: the flight of every position that is not settled.
        asked: positions whose bytes the client was asked for.
        shares: what was granted, by position, and not recalled.
        recalled: shares that were; each is held until the client has acknowledged it.
        consumers: how many others may claim a share of each grant.
        priority: code of its priority, see `PRIORITIES`.
        staged: tokens of deferred slices, by position.
        slices: what is staged for positions that are not settled.
        tokens: of the offers that went with grants, by position.
        began_s: when it arrived, on the monotonic clock; 0 for what is not timed, or was.
        num_failed, is_cancelled: how many positions failed, and whether any was given up.
    """

    __slots__ = (
        "_errors",
        "_failed",
        "_flush_due",
        "_granted",
        "_is_finished",
        "_need",
        "_offered",
        "_reasons",
        "_retry_after_s",
        "_timer",
        "_verify",
        "_window",
        "asked",
        "began_s",
        "call",
        "connection",
        "consumers",
        "deadline",
        "holder",
        "is_cancelled",
        "keys",
        "num_failed",
        "open",
        "priority",
        "recalled",
        "request_id",
        "shares",
        "slices",
        "staged",
        "tokens",
    )  # fmt: skip

    def __init__(self, connection: Connection, holder: Holder, call: Call, encode: EncodeFrame) -> None:
        keys = encode.keys
        self.connection = connection
        self.holder = holder
        self.call = call
        self.request_id = encode.request_id
        self.consumers = encode.consumers
        self.priority = encode.priority
        self.staged = encode.staged
        self.keys: tuple[bytes, ...] = struct.unpack(f"{KEY_BYTES}s" * (len(keys) // KEY_BYTES), keys)
        if connection.foreign is not None:
            self.keys = tuple(map(connection.foreign.key, self.keys))
        self.open: dict[int, Flight] = {}
        self.asked: set[int] = set()
        self.shares: dict[int, Share] = {}
        self.recalled: list[Share] = []
        self.tokens: dict[int, int] = {}
        self.slices: dict[int, StagedSlice] = {}
        self.began_s = 0.0
        self.num_failed = 0
        self.is_cancelled = False
        self._offered: list[int] = []
        self._is_finished = False
        self.deadline = asyncio.get_running_loop().time() + encode.timeout_ms / 1000
        self._granted: list[Any] = []
        self._need: list[int] = []
        self._verify: list[int] = []
        self._failed: list[int] = []
        self._errors: list[str] = []
        self._reasons: list[str] = []
        self._retry_after_s = 0.0
        self._flush_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._window: AbstractAsyncContextManager[None] | None = None

    @property
    def window(self) -> AbstractAsyncContextManager[None]:
        """Bounds the items whose bytes are asked for at once; of a request that has no more than that, nothing does."""
        if self._window is None:
            self._window = nullcontext() if len(self.keys) <= SUPPLY_WINDOW else asyncio.Semaphore(SUPPLY_WINDOW)
        return self._window

    @property
    def has_waited(self) -> bool:
        """Whether anything of it was not there when it came."""
        return self._timer is not None

    def send_hits(self, records: list[Any]) -> None:
        """Positions were granted at once, as the request came; `shares` has them already. See `send_grant`."""
        if self.consumers:
            for position, share in self.shares.items():
                self._offer(position, cast("Extent", share.extent))
        self._granted += records

    def send_grant(self, position: int, share: Share, extent: Extent, origin: int) -> None:
        """A position has its lease. The extent was published with its half of the record (`GRANT_EXTENT`)."""
        self.shares[position] = share
        self._granted += (GRANT_HEAD.pack(position, share.slot, share.generation, origin), extent.info)
        if self.consumers:
            self._offer(position, extent)
        if self.slices:
            self._end_slice(position, extent)
        if self.open and self.open.pop(position, None) is not None:
            self._flush_soon()

    def _offer(self, position: int, extent: Extent) -> None:
        if position not in self.tokens:
            self.tokens[position] = self.connection.offer(extent, self.consumers)
            self._offered.append(position)

    def fail(self, position: int, error: ItemError) -> None:
        """A position has its error."""
        self.num_failed += 1
        self._failed.append(position)
        self._errors.append(type(error).__name__)
        self._reasons.append(error.reason[:2000])
        if isinstance(error, Overloaded):
            self._retry_after_s = min(max(self._retry_after_s, error.retry_after_s), MAX_RETRY_S)
        self.connection.count_error(type(error).__name__)
        if (staged := self.slices.pop(position, None)) is not None:
            staged.ended(error)
        if self.open.pop(position, None) is not None:
            self._flush_soon()

    def ask(self, position: int) -> None:
        """Ask the client for the bytes of a position."""
        self.asked.add(position)
        self._need.append(position)
        self._flush_soon()

    def verify(self, position: int) -> None:
        """Ask the client for the bytes of a position that was granted in this turn of the loop, in the same frame."""
        self._verify.append(position)

    def flush(self) -> None:
        """Send what is settled or asked for since the last time."""
        self._flush_due = False
        more = None
        if self._failed or self._need or self._verify or self._offered:
            more = Unsettled(
                need=self._need, verify=self._verify, failed=self._failed, errors=self._errors, reasons=self._reasons,
                offered=self._offered, tokens=[self.tokens[position] for position in self._offered],
                retry_after_s=self._retry_after_s,
            )  # fmt: skip
            self._need, self._verify, self._failed, self._errors, self._reasons = [], [], [], [], []
            self._offered, self._retry_after_s = [], 0.0
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

    def recall(self, positions: Sequence[int], flight: Flight) -> None:
        """Take grants of a call that is not over back: their positions are open again, and wait with `flight`."""
        for position in positions:
            flight.join(self, position)
        if self._is_finished:
            self._is_finished, self._timer = False, None
            self.connection.calls.reopen(self)
        self.wait()
        self.flush()  # grants go before their recall
        for position in positions:
            self.recalled.append(self.shares.pop(position))
            if (token := self.tokens.pop(position, None)) is not None:
                self.connection.coordinator.offers.withdraw(token, self.holder)
        recall = Recall(request_id=self.request_id, positions=list(positions))
        self.connection.send(pack_frame(Kind.RECALL, recall))

    def cancel(self, positions: Sequence[int]) -> None:
        """Nobody wants these positions any more; all that are open, if none are named."""
        for position in positions or list(self.open):
            flight = self.open.pop(position, None)
            if flight is not None:
                self.is_cancelled = True
                flight.leave(self, position)
            if (staged := self.slices.pop(position, None)) is not None:
                staged.ended(None)
        if not self.open:
            self._finish()

    def _end_slice(self, position: int, extent: Extent) -> None:
        """A position that named a staged slice has its embedding."""
        if (staged := self.slices.pop(position, None)) is not None:
            if (pool := self.connection.coordinator.pools.pool_of(extent)) is not None:
                staged.cached(pool, extent)
            staged.ended(None)

    def _expire(self) -> None:
        late, self.open = self.open, {}
        errors = self.connection.late_errors()
        for position, flight in late.items():
            error = errors(flight)
            flight.leave(self, position)
            self.fail(position, error)
        self.flush()

    def _flush_soon(self) -> None:
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self.flush)

    def _finish(self) -> None:
        if self._is_finished:
            return
        self._is_finished = True
        if self._timer is not None:
            self._timer.cancel()
        if self.began_s:
            settled(self)
        self.connection.finished(self)
