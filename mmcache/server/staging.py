"""Staging regions: one a client, made when it first stages, where it alone writes and ranks read."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING

from ipc.errors import IpcError
from ipc.pool import Extent
from ipc.staging import Staged, Staging
from ipc.unmapped import UnmappedMemory
from mmcache.errors import SliceGone, StagingExhausted
from mmcache.server.staged import EMBEDDING_LOST, OVER, StagedSlice
from mmcache.server.staging_area import StagingArea

if TYPE_CHECKING:
    from mmcache.server.connection import Connection

COUNTED = ("num_staged", "num_reads", "num_unread", "num_cancelled", "num_failed", "num_died")


class StagingDesk:
    """Every staging region, within a bound for all, and every staged slice by its token.

    Attributes:
        on_gone: told of a region that is gone, by its id.
    """

    def __init__(self, region_bytes: int, max_bytes: int) -> None:
        self._region_bytes = region_bytes
        self._max_bytes = max_bytes
        self.on_gone: Callable[[int], None] = lambda _: None
        self._areas: dict[Connection, StagingArea] = {}
        self._ending: set[StagingArea] = set()  # their clients are gone; ranks still read, or the memory is being freed
        self._making: dict[Connection, asyncio.Task[StagingArea]] = {}
        self._slices: dict[int, StagedSlice] = {}
        self._last_region = 0
        self._num_making = 0
        self._past: Counter[str] = Counter()

    def area_of(self, connection: Connection) -> StagingArea | None:
        """A client's region, if it has one."""
        return self._areas.get(connection)

    def fd_of(self, region_id: int) -> int | None:
        """The descriptor of a region, to be passed on."""
        return next((area.fd for area in self._all() if area.region_id == region_id), None)

    async def make_area(self, connection: Connection) -> StagingArea:
        """A client's region, new if it has none. Whoever asks while it is made gets the same.

        Raises:
            StagingExhausted: those of all clients take as much as they may, or the machine lacks the memory.
            SliceGone: the client has left meanwhile.
        """
        if (area := self._areas.get(connection)) is not None:
            return area
        making = self._making.get(connection)
        if making is None:
            self._check_limit()
            making = self._making[connection] = asyncio.get_running_loop().create_task(self._make(connection))
        return await asyncio.shield(making)

    def add(self, area: StagingArea, staged: Staged, key: bytes, kind: str, header: bytes) -> int:
        """A slice that its client will write; its token."""
        token = secrets.randbits(64) or 1
        self._slices[token] = area.slices[token] = StagedSlice(area, token, staged, key, kind, header)
        return token

    def claim(self, token: int, key: bytes, namespace: str) -> StagedSlice:
        """A request names a slice.

        Raises:
            SliceGone: it is over, or not one of that key and namespace.
        """
        staged = self._slices.get(token)
        if staged is None or (staged.has_key and staged.key != key) or staged.area.namespace != namespace:
            raise SliceGone(OVER)
        staged.claim()
        return staged

    def own(self, connection: Connection, token: int) -> StagedSlice | None:
        """A slice that this client staged."""
        area = self._areas.get(connection)
        return area.slices.get(token) if area is not None else None

    def kept_of(self, connection: Connection) -> list[StagedSlice]:
        """A client's slices whose embeddings are kept for consumers that may come, in no order."""
        area = self._areas.get(connection)
        return [staged for staged in area.slices.values() if staged.kept is not None] if area is not None else []

    def lost(self, extents: Collection[Extent]) -> None:
        """These embeddings are of no use any more: they are not kept."""
        for staged in list(self._slices.values()):
            if staged.kept is not None and staged.kept.extent in extents:
                staged.let_go(EMBEDDING_LOST)

    def quarantine(self, connection: Connection) -> bool:
        """The client's socket is closed and its process lives. Whether it keeps something of a region, for now.

        That is what it was in the middle of writing, until it dies, and what ranks read, until they are done.
        """
        self._making.pop(connection, None)
        if (area := self._areas.get(connection)) is not None:
            area.leave(area.staging.quarantine)
        return connection in self._areas

    def end(self, connection: Connection) -> None:
        """The client is dead, or has said that it writes no more."""
        self._making.pop(connection, None)
        if (area := self._areas.pop(connection, None)) is not None:
            self._ending.add(area)
            area.leave(area.staging.end_all)

    def row_of(self, connection: Connection) -> dict[str, int | float]:
        """What a client has staged, for `mmcache leases`.

        Slices and their bytes; bytes of those that it was writing when its socket closed; what its region takes of the
        machine's memory; and the region's age.
        """
        if (area := self._areas.get(connection)) is None:
            return dict.fromkeys(
                ("staged", "bytes_staged", "bytes_staged_quarantined", "bytes_region", "region_seconds"), 0
            )
        return {
            "staged": len(area.staging.slices()),
            "bytes_staged": area.staging.bytes_used,
            "bytes_staged_quarantined": area.staging.bytes_quarantined,
            "bytes_region": area.bytes_charged,
            "region_seconds": round(time.monotonic() - area.made_at, 3),
        }

    def counters(self) -> dict[str, int]:
        """For `mmcache stats`."""
        areas = self._all()
        stagings = [area.staging for area in areas]
        total = sum((_counts(staging) for staging in stagings), self._past.copy())
        return {
            "regions": len(areas),
            "bytes_total": sum(area.bytes_charged for area in areas),
            "bytes_used": sum(staging.bytes_used for staging in stagings),
            "bytes_quarantined": sum(staging.bytes_quarantined for staging in stagings),
            **{name.removeprefix("num_"): total[name] for name in COUNTED},
        }

    def check(self) -> None:
        """Assert that regions and slices agree."""
        for area in self._all():
            area.staging.check()
        for area in self._areas.values():
            for token, staged in area.slices.items():
                assert self._slices.get(token) is staged, "a staged slice is not found by its token"
        assert len(self._slices) == sum(len(area.slices) for area in self._areas.values()), "a staged slice is lost"

    def _all(self) -> list[StagingArea]:
        return [*self._areas.values(), *self._ending]

    def _check_limit(self) -> None:
        areas = self._all()
        used = sum(area.bytes_charged for area in areas) + self._num_making * self._region_bytes
        if used + self._region_bytes > self._max_bytes:
            num_regions = len(areas) + self._num_making
            reason = f"{num_regions} regions of clients take {used} bytes, the limit is {self._max_bytes} for all"
            raise StagingExhausted(f"{reason} (staging_bytes_total), one more takes {self._region_bytes}")
        self._num_making += 1  # until it is made

    async def _make(self, connection: Connection) -> StagingArea:
        try:
            memory = await asyncio.to_thread(UnmappedMemory.create, "mmcache-staging", self._region_bytes)
            if self._making.get(connection) is not asyncio.current_task():
                await asyncio.to_thread(memory.close)
                raise SliceGone(OVER)
        except IpcError as error:
            raise StagingExhausted(str(error)) from error
        finally:
            self._num_making -= 1
            if self._making.get(connection) is asyncio.current_task():
                del self._making[connection]
        self._last_region += 1
        idle = partial(self._idle, connection)
        area = StagingArea(self._last_region, connection.namespace, memory, self._forget_slice, idle)
        self._areas[connection] = area
        return area

    def _idle(self, connection: Connection, area: StagingArea) -> None:
        """A client has left, and nobody needs its memory any more."""
        if self._areas.get(connection) is area:
            del self._areas[connection]
        self._ending.add(area)
        self.on_gone(area.region_id)
        area.close(self._closed)

    def _closed(self, area: StagingArea) -> None:
        self._ending.discard(area)
        self._past.update(_counts(area.staging))

    def _forget_slice(self, staged: StagedSlice) -> None:
        self._slices.pop(staged.token, None)


def _counts(staging: Staging) -> Counter[str]:
    return Counter({name: getattr(staging, name) for name in COUNTED})
