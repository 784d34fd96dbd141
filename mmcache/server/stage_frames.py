"""What clients say of staged slices: make room for one, it is written, a request names it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from ipc.leases import Holder
from ipc.staging import Staged as Slice
from mmcache.errors import EncodeFailed, ItemError, ProtocolError, SliceGone, TooManyRequests
from mmcache.framing import Frame, Kind, pack_frame, parse
from mmcache.protocol import Stage, Staged, StagePlaces
from mmcache.records import KEY_BYTES, parse_staged
from mmcache.server.staged_headers import checked_header
from mmcache.server.staging_area import StagingArea

if TYPE_CHECKING:
    from mmcache.server.connection import Connection
    from mmcache.server.requests import Request


def on_stage(connection: Connection, _: Holder, frame: Frame) -> None:
    """STAGE: find room for each of some slices, and answer where.

    Raises:
        ProtocolError: the columns differ in length, or far too many questions have come.
    """
    stage = parse(Stage, frame)
    keys = [frame.body[start : start + KEY_BYTES] for start in range(0, len(frame.body), KEY_BYTES)]
    if (
        not keys
        or {len(keys)} != {len(stage.kinds), len(stage.headers), len(stage.sizes)}
        or len(keys[-1]) != KEY_BYTES
    ):
        raise ProtocolError("the columns of a STAGE differ in length")
    placing = _Placing(connection, stage, keys)
    try:
        connection.admit_question()
    except TooManyRequests as error:
        placing.refuse(error)
    else:
        connection.coordinator.background.spawn(connection, placing.carry(), placing.fail)


class _Placing:
    """The answer to one STAGE."""

    def __init__(self, connection: Connection, stage: Stage, keys: list[bytes]) -> None:
        self._connection = connection
        self._home = connection.coordinator
        self._stage = stage
        self._items = list(zip(keys, stage.kinds, stage.headers, stage.sizes, strict=True))
        self._own: list[Slice] = []
        self._tokens: list[int] = []

    async def carry(self) -> None:
        """Find a place for each; after the first that has none, the others are not tried."""
        deadline = asyncio.get_running_loop().time() + self._stage.timeout_ms / 1000
        num_good, failure = self._check()
        area: StagingArea | None = None
        if num_good:
            try:
                area = await self._home.staging.make_area(self._connection)
                await self._place(area, num_good, deadline)
            except ItemError as error:
                failure = error
        self._answer(area, failure)

    def refuse(self, error: ItemError) -> None:
        """Answer that nothing is staged. Instead of `carry`."""
        self._answer(None, error)

    def fail(self, fault: Exception) -> None:
        """Answer that a fault of ours ended it."""
        for token in self._tokens:
            if (staged := self._home.staging.own(self._connection, token)) is not None:
                staged.end("a fault of the sidecar ended its staging")
        self._tokens, self._own = [], []
        self._answer(None, EncodeFailed(f"internal error: {fault!r}"))

    def _check(self) -> tuple[int, ItemError | None]:
        """How many of the first items may be staged, and what is wrong with the next."""
        for place, (_, kind, header, nbytes) in enumerate(self._items):
            try:
                checked_header(kind, header, nbytes, self._home.settings.max_pixels, self._home.facts.processor)
            except ItemError as error:
                return place, error
        return len(self._items), None

    async def _place(self, area: StagingArea, num_items: int, deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline), area.turn:
                for key, kind, header, nbytes in self._items[:num_items]:
                    staged = await area.reserve(nbytes, self._stage.consumers, self._own)
                    self._own.append(staged)
                    self._tokens.append(self._home.staging.add(area, staged, key, kind, header))
        except TimeoutError:
            raise area.late() from None

    def _answer(self, area: StagingArea | None, failure: ItemError | None) -> None:
        num_failed = len(self._items) - len(self._tokens)
        assert (failure is not None) == (num_failed > 0), "what has no place has an error"
        kind, reason = (type(failure).__name__, failure.reason[:2000]) if failure is not None else ("", "")
        if failure is not None:
            self._connection.count_error(kind)
        places = StagePlaces(
            ask_id=self._stage.ask_id,
            tokens=self._tokens + [0] * num_failed, offsets=[staged.offset for staged in self._own] + [0] * num_failed,
            errors=[""] * len(self._tokens) + [kind] * num_failed,
            reasons=[""] * len(self._tokens) + [reason] * num_failed,
        )  # fmt: skip
        fds = []
        if area is not None and not area.is_shown and area.fd is not None:
            fds, area.is_shown = [area.fd], True
        self._connection.send(pack_frame(Kind.STAGE_PLACES, places, fds=fds))


def on_staged(connection: Connection, _: Holder, frame: Frame) -> None:
    """STAGED: the client has written them. What is over meanwhile is ignored."""
    has_keys = parse(Staged, frame).has_keys
    for token, key in parse_staged(frame, has_keys):
        if (staged := connection.coordinator.staging.own(connection, token)) is not None:
            staged.written(key)


def claim_slices(request: Request, misses: list[int]) -> list[int]:
    """Positions of a request that name slices claim them. Returns the misses that are left; the others have failed."""
    home = request.connection.coordinator
    missed = set(misses)
    for position, token in request.staged.items():
        key = request.keys[position]
        try:
            staged = home.staging.claim(token, key, request.connection.namespace)
        except SliceGone as error:
            if position in missed:
                missed.discard(position)
                request.fail(position, error)
            continue
        staged.num_active += 1
        if position in missed:
            request.slices[position] = staged
        else:
            with contextlib.suppress(KeyError):
                extent = home.pools.index[key]
                if (pool := home.pools.pool_of(extent)) is not None:
                    staged.cached(pool, extent)
            staged.ended(None)
    return [position for position in misses if position in missed]
