"""Staging regions: one a client, made when it first stages, where it alone writes and ranks read."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from ipc.errors import ExtentTooLarge, IpcError
from ipc.memory_shm import SharedRegion
from ipc.staging import Staged, Staging
from mmcache.errors import SliceGone, StagingExhausted
from mmcache.server.staged import OVER, StagedSlice

if TYPE_CHECKING:
    from mmcache.server.connection import Connection

COUNTED = ("num_staged", "num_reads", "num_unread", "num_cancelled", "num_failed", "num_died")


class StagingArea:
    """One client's region and what is in it.

    Attributes:
        region_id: names the region to ranks.
        namespace: of the client.
        is_shown: whether the client has its descriptor.
        on_idle: called once, when nothing of it is read any more.
    """

    def __init__(
        self, region_id: int, namespace: str, region: SharedRegion, forget: Callable[[StagedSlice], None]
    ) -> None:
        self.region_id = region_id
        self.namespace = namespace
        self.region = region
        self.staging = Staging(region.nbytes)
        self.slices: dict[int, StagedSlice] = {}
        self.is_shown = False
        self._forget = forget
        self.on_idle: Callable[[], None] | None = None
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    async def reserve(self, nbytes: int, consumers: int, deadline: float) -> Staged:
        """Room for a slice, in the order of arrival.

        Raises:
            StagingExhausted: never, or not before the deadline on the loop's clock.
            SliceGone: the client has left meanwhile.
        """
        try:
            async with asyncio.timeout_at(deadline), self._turn:
                while True:
                    if self.staging.state.name != "CONNECTED":
                        raise SliceGone(OVER)
                    if (staged := self.staging.reserve(nbytes, consumers)) is not None:
                        return staged
                    self._freed.clear()
                    await self._freed.wait()
        except ExtentTooLarge as error:
            raise StagingExhausted(f"{error}; raise staging_bytes") from error
        except TimeoutError:
            used, total = self.staging.bytes_used, self.staging.bytes_total
            reason = (
                f"no room until the deadline: {len(self.slices)} slices of this client take {used} of {total} bytes"
            )
            raise StagingExhausted(f"{reason} (staging_bytes)") from None

    def freed(self) -> None:
        """Bytes were given back."""
        self._freed.set()
        if self.on_idle is not None and self.staging.is_idle:
            on_idle, self.on_idle = self.on_idle, None
            on_idle()

    def forget(self, staged: StagedSlice) -> None:
        """A slice is over (called by it)."""
        self.slices.pop(staged.token, None)
        self._forget(staged)

    def leave(self, leave: Callable[[], None]) -> None:
        """The client has left in one of two ways, `Staging.quarantine` or `Staging.end_all`."""
        leave()
        for staged in list(self.slices.values()):
            staged.left()
        self.freed()


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
        self._ending: set[StagingArea] = set()  # their clients are gone, and ranks still read
        self._slices: dict[int, StagedSlice] = {}
        self._last_region = 0
        self._num_making = 0
        self._past: Counter[str] = Counter()

    def area_of(self, connection: Connection) -> StagingArea | None:
        """A client's region, if it has one."""
        return self._areas.get(connection)

    def fd_of(self, region_id: int) -> int | None:
        """The descriptor of a region, to be passed on."""
        areas = (*self._areas.values(), *self._ending)
        return next((area.region.fd for area in areas if area.region_id == region_id), None)

    async def make_area(self, connection: Connection) -> StagingArea:
        """A client's region, new if it has none.

        Raises:
            StagingExhausted: those of all clients take as much as they may, or the machine lacks the memory.
        """
        if (area := self._areas.get(connection)) is not None:
            return area
        used = (len(self._areas) + self._num_making) * self._region_bytes
        if used + self._region_bytes > self._max_bytes:
            reason = f"{len(self._areas)} clients stage in {used} bytes, the limit is {self._max_bytes} for all"
            raise StagingExhausted(f"{reason} (staging_bytes_total)")
        self._num_making += 1
        try:
            region = await asyncio.to_thread(_new_region, self._region_bytes)
        except IpcError as error:
            raise StagingExhausted(str(error)) from error
        finally:
            self._num_making -= 1
        if not connection.is_open:
            region.close()
            raise SliceGone(OVER)
        if (area := self._areas.get(connection)) is not None:  # two frames asked for it
            region.close()
            return area
        self._last_region += 1
        area = StagingArea(self._last_region, connection.namespace, region, self._forget_slice)
        self._areas[connection] = area
        return area

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
        if staged is None or staged.key != key or staged.area.namespace != namespace:
            raise SliceGone(OVER)
        staged.claim()
        return staged

    def own(self, connection: Connection, token: int) -> StagedSlice | None:
        """A slice that this client staged."""
        area = self._areas.get(connection)
        return area.slices.get(token) if area is not None else None

    def quarantine(self, connection: Connection) -> bool:
        """The client's socket is closed and its process lives. Whether it has a region, which stays as long."""
        area = self._areas.get(connection)
        if area is not None:
            area.leave(area.staging.quarantine)
        return area is not None

    def end(self, connection: Connection) -> None:
        """The client is dead, or has said that it writes no more."""
        area = self._areas.pop(connection, None)
        if area is None:
            return
        self._ending.add(area)
        area.on_idle = lambda: self._close(area)
        area.leave(area.staging.end_all)

    def counters(self) -> dict[str, int]:
        """For `mmcache stats`."""
        stagings = [area.staging for area in (*self._areas.values(), *self._ending)]
        total = sum((_counts(staging) for staging in stagings), self._past.copy())
        return {
            "regions": len(stagings),
            "bytes_total": sum(staging.bytes_total for staging in stagings),
            "bytes_used": sum(staging.bytes_used for staging in stagings),
            "bytes_quarantined": sum(staging.bytes_quarantined for staging in stagings),
            **{name.removeprefix("num_"): total[name] for name in COUNTED},
        }

    def check(self) -> None:
        """Assert that regions and slices agree."""
        for area in self._areas.values():
            area.staging.check()
            for token, staged in area.slices.items():
                assert self._slices.get(token) is staged, "a staged slice is not found by its token"
        assert len(self._slices) == sum(len(area.slices) for area in self._areas.values()), "a staged slice is lost"

    def _close(self, area: StagingArea) -> None:
        self._ending.discard(area)
        self._past.update(_counts(area.staging))
        area.region.close()
        self.on_gone(area.region_id)

    def _forget_slice(self, staged: StagedSlice) -> None:
        self._slices.pop(staged.token, None)


def _new_region(nbytes: int) -> SharedRegion:
    region = SharedRegion.create("mmcache-staging", nbytes)
    region.seal_resize()
    return region


def _counts(staging: Staging) -> Counter[str]:
    return Counter({name: getattr(staging, name) for name in COUNTED})
