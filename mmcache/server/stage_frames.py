"""What clients say of staged slices: make room for one, it is written, a request names it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from ipc.leases import Holder
from mmcache.errors import ItemError, ProtocolError, SliceGone
from mmcache.framing import Frame, Kind, pack_frame, parse
from mmcache.protocol import Stage, Staged, StagePlaces
from mmcache.records import KEY_BYTES, parse_tokens
from mmcache.server.staged import checked_header
from mmcache.server.staging import StagingArea

if TYPE_CHECKING:
    from mmcache.server.connection import Connection
    from mmcache.server.requests import Request


def on_stage(connection: Connection, _: Holder, frame: Frame) -> None:
    """STAGE: find room for each of some slices, and answer where.

    Raises:
        ProtocolError: the columns differ in length, or too many questions are open.
    """
    stage = parse(Stage, frame)
    keys = [frame.body[start : start + KEY_BYTES] for start in range(0, len(frame.body), KEY_BYTES)]
    if (
        not keys
        or {len(keys)} != {len(stage.kinds), len(stage.headers), len(stage.sizes)}
        or len(keys[-1]) != KEY_BYTES
    ):
        raise ProtocolError("the columns of a STAGE differ in length")
    background = connection.coordinator.background
    background.admit(connection)
    background.spawn(connection, _Placing(connection, stage, keys).carry(), lambda _: None)


class _Placing:
    """The answer to one STAGE."""

    def __init__(self, connection: Connection, stage: Stage, keys: list[bytes]) -> None:
        self._connection = connection
        self._stage = stage
        self._keys = keys
        self._tokens: list[int] = []
        self._offsets: list[int] = []
        self._errors: list[str] = []
        self._reasons: list[str] = []

    async def carry(self) -> None:
        """Find a place for each; after the first that has none, the others are not tried."""
        loop, stage = asyncio.get_running_loop(), self._stage
        deadline = loop.time() + stage.timeout_ms / 1000
        area: StagingArea | None = None
        failure: ItemError | None = None
        for key, kind, header, nbytes in zip(self._keys, stage.kinds, stage.headers, stage.sizes, strict=True):
            token = offset = 0
            if failure is None:
                try:
                    area, token, offset = await self._place(key, kind, header, nbytes, deadline)
                except ItemError as error:
                    failure = error
            self._tokens.append(token)
            self._offsets.append(offset)
            self._errors.append(type(failure).__name__ if failure is not None else "")
            self._reasons.append(failure.reason[:2000] if failure is not None else "")
        if failure is not None:
            self._connection.count_error(type(failure).__name__)
        self._answer(area)

    async def _place(
        self, key: bytes, kind: str, header: bytes, nbytes: int, deadline: float
    ) -> tuple[StagingArea, int, int]:
        home = self._connection.coordinator
        checked_header(kind, header, nbytes, home.settings.max_pixels)
        area = await home.staging.make_area(self._connection)
        staged = await area.reserve(nbytes, self._stage.consumers, deadline)
        return area, home.staging.add(area, staged, key, kind, header), staged.offset

    def _answer(self, area: StagingArea | None) -> None:
        shows = area is not None and not area.is_shown
        places = StagePlaces(
            ask_id=self._stage.ask_id, tokens=self._tokens, offsets=self._offsets, errors=self._errors,
            reasons=self._reasons,
        )  # fmt: skip
        fds = [area.region.fd] if area is not None and shows else []
        if area is not None:
            area.is_shown = True
        self._connection.send(pack_frame(Kind.STAGE_PLACES, places, fds=fds))


def on_staged(connection: Connection, _: Holder, frame: Frame) -> None:
    """STAGED: the client has written them. What is over meanwhile is ignored."""
    parse(Staged, frame)
    for token in parse_tokens(frame):
        if (staged := connection.coordinator.staging.own(connection, token)) is not None:
            staged.written()


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
                if (rank := home.pools.rank_of(extent)) is not None:
                    staged.cached(rank.pool, extent)
            staged.ended(None)
    return [position for position in misses if position in missed]
