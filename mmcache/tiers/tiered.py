"""What the coordinator holds: tiers asked in order within a time, and filled later. Nothing here fails a request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mmcache.histograms import FAST_S, Histogram
from mmcache.keys import checksum
from mmcache.tiers.base import ITEM_BYTES, Entry, LeftBehindError, Purged, Selection, Tier, TierError
from mmcache.tiers.threads import Threads, settled

log = logging.getLogger(__name__)

T = TypeVar("T")

_EVENTS = (
    "hits", "misses", "read", "lost", "late", "failed", "written", "write_failed", "dropped",
)  # fmt: skip


@dataclass(slots=True, eq=False)
class _Pending:
    key: bytes
    namespace: bytes
    shape: tuple[int, int]
    dtype: str
    grid_thw: tuple[int, int, int]
    encode_seconds: float
    created_s: float
    payload: memoryview
    done: Callable[[], None]
    is_unwanted: bool = False

    def entry(self, digest: int) -> Entry:
        return Entry(
            self.key, self.namespace, self.shape, self.dtype, self.grid_thw,
            self.payload.nbytes, digest, self.created_s, self.encode_seconds,
        )  # fmt: skip


class TieredStore:
    """Look-ups and reads bounded in time, writes bounded in bytes. Used on one event loop, which it never blocks.

    Args:
        tiers: fastest first; owned from now on. Without any, everything is a miss.
        timeout_s: bound of one look-up or read, over all tiers.
        write_behind_bytes: most payload bytes waiting to be written, the one being written included.
        clock: Unix time in seconds.

    Attributes:
        find_seconds, read_seconds: of the look-ups and reads that a tier answered, by its name.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        timeout_s: float,
        write_behind_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._tiers = list(tiers)
        self._timeout_s = timeout_s
        self._write_behind_bytes = write_behind_bytes
        self._clock = clock
        self._events: Counter[str] = Counter()
        self._failing: set[str] = set()
        self.find_seconds = {tier.name: Histogram(FAST_S) for tier in tiers}
        self.read_seconds = {tier.name: Histogram(FAST_S) for tier in tiers}
        self._queue: deque[_Pending] = deque()
        self._queued_bytes = 0
        self._writing: _Pending | None = None
        self._worker: asyncio.Task[None] | None = None
        self._hasher = Threads(1, "mmcache-checksum")
        self._is_closing = False

    @property
    def has_tiers(self) -> bool:
        """Whether anything is written at all."""
        return bool(self._tiers)

    def count_dropped(self) -> None:
        """An embedding could not be given to `put_behind`."""
        self._events["dropped"] += 1

    async def find(self, keys: Sequence[bytes]) -> list[Entry | None]:
        """What the tiers know of each key, None for a miss. A tier that is late or failing is a counted miss."""
        found: list[Entry | None] = [None] * len(keys)
        deadline = self._deadline()
        for tier in self._tiers:
            if not (missing := [place for place, entry in enumerate(found) if entry is None]):
                break
            entries = await self._bounded(
                tier, tier.find([keys[place] for place in missing]), deadline, self.find_seconds
            )
            for place, entry in zip(missing, entries or [], strict=entries is not None):
                found[place] = entry
        num_misses = found.count(None)
        self._events["misses"] += num_misses
        self._events["hits"] += len(keys) - num_misses
        return found

    async def read(self, entry: Entry, into: memoryview) -> bool:
        """Copy and verify a payload that `find` returned. False, counted, when it is lost, damaged, late or failing.

        Args:
            into: the caller's, at least `entry.nbytes` bytes; nothing writes to it after the call, however it ends.
        """
        assert into.nbytes >= entry.nbytes, f"{entry.nbytes} bytes do not fit into {into.nbytes}"
        deadline = self._deadline()
        for tier in self._tiers:
            if await self._bounded(tier, tier.read(entry, into), deadline, self.read_seconds):
                self._events["read"] += 1
                return True
        self._events["lost"] += 1
        return False

    def put_behind(
        self,
        *,
        key: bytes,
        namespace: bytes,
        shape: tuple[int, int],
        dtype: str,
        grid_thw: tuple[int, int, int],
        encode_seconds: float,
        payload: memoryview,
        done: Callable[[], None],
    ) -> None:
        """Write an embedding to every tier, later. Dropped and counted when too many bytes wait already.

        Args:
            payload: must stay as it is until `done`.
            done: called once, on the loop: when nothing reads the payload any more, at once if it is dropped. Never
                called if `close` had to leave the write behind.
        """
        nbytes = payload.nbytes
        assert nbytes == shape[0] * shape[1] * ITEM_BYTES[dtype], f"{nbytes} bytes are not {shape} of {dtype}"
        if not self._tiers:
            done()
        elif self._is_closing or self._queued_bytes + nbytes > self._write_behind_bytes:
            self._events["dropped"] += 1
            done()
        else:
            self._queued_bytes += nbytes
            now = self._clock()
            self._queue.append(_Pending(key, namespace, shape, dtype, grid_thw, encode_seconds, now, payload, done))
            if self._worker is None or self._worker.done():
                self._worker = asyncio.get_running_loop().create_task(self._work())

    async def remove(self, key: bytes) -> bool:
        """Remove an entry from every tier, and from what waits to be written. False, counted, if it may still be there.

        What is given to `put_behind` under the key from now on is written as ever.
        """
        self._forgo(Selection(keys={key}))
        deadline = self._deadline()
        return all([await self._bounded(tier, _removed(tier, key), deadline) for tier in self._tiers])

    async def purge(self, selection: Selection, *, is_dry_run: bool = False) -> dict[str, Purged | TierError]:
        """Remove what is meant from every tier, and from what waits to be written; or only count it.

        What each tier had, by its name, or why some may still be there. It takes as long as the tiers do.
        """
        if not is_dry_run:
            self._forgo(selection)
        purges = [tier.purge(selection, is_dry_run=is_dry_run) for tier in self._tiers]
        outcomes = await asyncio.gather(*purges, return_exceptions=True)
        found: dict[str, Purged | TierError] = {}
        for tier, outcome in zip(self._tiers, outcomes, strict=True):
            if not isinstance(outcome, Purged | TierError):
                raise outcome
            found[tier.name] = outcome
        return found

    async def drain(self, timeout_s: float) -> None:
        """Wait until everything is written, or the time is over."""
        if self._worker is not None:
            await asyncio.wait([self._worker], timeout=timeout_s)

    async def close(self, timeout_s: float) -> bool:
        """Drop and count what waits, finish the write in progress, close the tiers: all within the time.

        True when everything is closed; False when a write or read hung, and a thread was left behind with it. The
        payload of such a write keeps its `done` uncalled. Closing twice is harmless.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        self._is_closing = True
        while self._queue:
            self._events["dropped"] += 1
            self._finish(self._queue.popleft())
        await self.drain(timeout_s)
        closers = [tier.close for tier in self._tiers] + [self._hasher.close]
        closed = await asyncio.gather(*(close(self._left(deadline)) for close in closers))
        if self._worker is not None:
            await asyncio.wait([self._worker])
        return all(closed)

    def counters(self) -> dict[str, object]:
        """Events since the start, what waits now, and each tier's own counters by its name.

        `hits`, `misses`: keys looked up. `read`, `lost`: payloads asked for. `late`, `failed`: look-ups and reads of
        one tier. `written`, `write_failed`: writes to one tier. `dropped`: embeddings never written.
        """
        events: dict[str, object] = {event: self._events[event] for event in _EVENTS}
        tiers = {tier.name: dict(tier.counters) for tier in self._tiers}
        return events | {"queued": len(self._queue), "queued_bytes": self._queued_bytes, "tiers": tiers}

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._timeout_s

    def _left(self, deadline: float) -> float:
        return max(0.0, deadline - asyncio.get_running_loop().time())

    async def _bounded(
        self, tier: Tier, work: Awaitable[T], deadline: float, seconds: Mapping[str, Histogram] | None = None
    ) -> T | None:
        began_s = time.monotonic()
        try:
            async with asyncio.timeout_at(deadline):
                result = await work
        except TimeoutError:
            self._note(tier, "late", f"no answer within {self._timeout_s} s")
            return None
        except TierError as error:
            self._note(tier, "failed", str(error))
            return None
        if seconds is not None:
            seconds[tier.name].observe(time.monotonic() - began_s)
        self._failing.discard(tier.name)
        return result

    def _note(self, tier: Tier, event: str, reason: str) -> None:
        """Count every failure, log the first of a row."""
        self._events[event] += 1
        if tier.name not in self._failing:
            self._failing.add(tier.name)
            log.warning("store tier %s: %s; requests go on without it", tier.name, reason)

    def _forgo(self, selection: Selection) -> None:
        """What waits to be written and is meant will not be, or is removed once it is."""
        for pending in [pending for pending in self._queue if selection.matches(pending.key, pending.namespace)]:
            self._queue.remove(pending)
            self._events["dropped"] += 1
            self._finish(pending)
        if (writing := self._writing) is not None and selection.matches(writing.key, writing.namespace):
            writing.is_unwanted = True

    async def _work(self) -> None:
        while self._queue:
            pending = self._writing = self._queue.popleft()
            try:
                await self._write(pending)
            except LeftBehindError as error:
                log.error("store: a write of %d bytes: %s", pending.payload.nbytes, error)
                return  # a thread may still read the payload: it is never done
            finally:
                self._writing = None
            self._finish(pending)

    async def _write(self, pending: _Pending) -> None:
        digest = await settled(self._hasher.submit(checksum, pending.payload))
        entry = pending.entry(digest)
        for tier in self._tiers:
            if pending.is_unwanted:
                return
            try:
                await tier.put(entry, pending.payload)
                self._events["written"] += 1
                if pending.is_unwanted:  # its removal may have come before it
                    await tier.remove([pending.key])
                self._failing.discard(tier.name)
            except LeftBehindError:
                raise
            except TierError as error:
                self._note(tier, "write_failed", str(error))

    def _finish(self, pending: _Pending) -> None:
        self._queued_bytes -= pending.payload.nbytes
        pending.done()


async def _removed(tier: Tier, key: bytes) -> bool:
    await tier.remove([key])
    return True
