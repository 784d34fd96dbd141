"""Checks what is cached: of every so many hits, one is encoded again and compared, when there is time for it.

The hit itself is served as ever; its client sends the bytes afterwards. Nothing waits for a verification, and it waits
for nothing: where it would take what requests need, it is dropped.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ipc.pool import Extent
from mmcache.errors import ItemError
from mmcache.keys import ContentKey, Fingerprint, store_key
from mmcache.records import GRANT_EXTENT
from mmcache.server.batcher import BatchFailedError, RankLostError, RecalledError
from mmcache.server.decode_job import Job
from mmcache.server.decoders import Supplied
from mmcache.server.flight import Waiter
from mmcache.server.ingest import IngestBusyError
from mmcache.server.messages import Compared
from mmcache.server.microbatch import EncodeJob
from mmcache.server.rank import Rank
from mmcache.server.requests import Request
from mmcache.server.sources import sizes

if TYPE_CHECKING:
    from mmcache.server.connection import Connection
    from mmcache.server.coordinator import Coordinator

log = logging.getLogger(__name__)

Place: TypeAlias = "tuple[Connection, int, int]"
"""A position of a request that may be over: connection, request id, position."""

MAX_AT_ONCE = 2
"""Asked for or under way; of one connection, one is asked for at a time."""
PATIENCE_S = 5.0
"""A client sends the bytes at once or not at all."""
MAX_ENCODE_S = 1.0
"""An item that is predicted to take longer is not encoded again: a request may come meanwhile."""
MAX_CONDEMNED = 1024
OUTCOMES = ("matched", "mismatched", "dropped")


class Bound(NamedTuple):
    """How far two encodings of one item may be apart: of the whole item, and of each token."""

    relative_error: float
    min_cosine: float


BOUNDS = {"float32": Bound(1e-5, float("-inf")), "bfloat16": Bound(4e-2, 0.9996)}
"""Without `deterministic`. In bfloat16 each is within 2e-2 and 0.9999 of the truth (docs/fidelity.md), and so
within these of the other: errors add up, and so do angles."""


class Sampler:
    """Chooses one hit of each `every` in a row, at a place drawn anew for each row.

    Every row has its sample, so the number is exact; a client whose requests repeat with the same period is not always
    sampled at the same position, as it would be by counting alone.
    """

    def __init__(self, every: int, draw: random.Random) -> None:
        self._every = every
        self._draw = draw
        self._num_seen = 0
        self._row_start = 0
        self._next = draw.randrange(every)

    def choose(self, num_hits: int) -> list[int]:
        """Which of the next `num_hits` hits are chosen, counted from 0."""
        first, self._num_seen = self._num_seen, self._num_seen + num_hits
        chosen = []
        while self._next < self._num_seen:
            chosen.append(self._next - first)
            self._row_start += self._every
            self._next = self._row_start + self._draw.randrange(self._every)
        return chosen


@dataclass(frozen=True, slots=True)
class _Expected:
    extent: Extent
    fingerprint: Fingerprint
    timer: asyncio.TimerHandle


class _NoVerdictError(Exception):
    """The verification would take what requests need, or what it was about has changed."""


NO_VERDICT = (_NoVerdictError, IngestBusyError, BatchFailedError, RankLostError, RecalledError)


class Verifier:
    """All verifications of a sidecar. `every` is the setting `verify_sample`; 0 is never.

    Attributes:
        counters: `sampled` hits, and how each ended: `matched`, `mismatched` or `dropped` without a verdict.
    """

    def __init__(self, coordinator: Coordinator, every: int, draw: random.Random) -> None:
        self._home = coordinator
        self._loop = asyncio.get_running_loop()
        self._sampler = Sampler(every, draw) if every else None
        self._expected: dict[Place, _Expected] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._condemned: dict[bytes, None] = {}
        self.counters: Counter[str] = Counter(dict.fromkeys(("sampled", *OUTCOMES), 0))

    def pool_hits(self, request: Request, misses: Sequence[int]) -> None:
        """All positions of a request but `misses` were granted from the pool; they are sent with what this asks for."""
        if self._sampler is not None and (chosen := self._sampler.choose(len(request.keys) - len(misses))):
            missed = set(misses)
            hits = [position for position in range(len(request.keys)) if position not in missed]
            for place in chosen:
                self._ask(request, hits[place])

    def store_hits(self, waiters: Collection[Waiter]) -> None:
        """Positions were granted from the store; they are sent with what this asks for."""
        if self._sampler is not None and (chosen := self._sampler.choose(len(waiters))):
            hits = list(waiters)
            for place in chosen:
                self._ask(*hits[place])

    def supply(self, connection: Connection, request_id: int, position: int, supplied: Supplied) -> bool:
        """Bytes came. True if they were waited for here: then this is one more user of their memory."""
        expected = self._expected.pop((connection, request_id, position), None)
        if expected is None:
            return False
        expected.timer.cancel()
        supplied.memory.share()
        task = self._loop.create_task(self._verify(expected, supplied))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return True

    def forget(self, connection: Connection) -> None:
        """A connection is closed: what it has not sent does not come."""
        for place in [place for place in self._expected if place[0] is connection]:
            self._give_up(place)

    def is_condemned(self, key: bytes) -> bool:
        """Whether the store's entry under a store key is known to be wrong, and may still be there."""
        return key in self._condemned

    def stop(self) -> None:
        """Begin no more; what is under way may end."""
        self._sampler = None
        for place in list(self._expected):
            self._give_up(place)

    def cancel(self) -> None:
        """Drop everything. The ranks and decoders are dead."""
        self.stop()
        for task in list(self._tasks):
            task.cancel()

    def _ask(self, request: Request, position: int) -> None:
        if request.connection.foreign is not None:  # nothing here can encode it again
            return
        self.counters["sampled"] += 1
        extent = self._home.pools.get(request.keys[position])
        if extent is None or not self._may_ask(request.connection) or self._free_rank(extent) is None:
            self.counters["dropped"] += 1
            return
        place = (request.connection, request.request_id, position)
        timer = self._loop.call_later(PATIENCE_S, self._give_up, place)
        self._expected[place] = _Expected(extent, self._home.fingerprint, timer)
        request.verify(position)

    def _may_ask(self, connection: Connection) -> bool:
        has_asked = any(place[0] is connection for place in self._expected)
        return not has_asked and len(self._expected) + len(self._tasks) < MAX_AT_ONCE

    def _give_up(self, place: Place) -> None:
        self._expected.pop(place).timer.cancel()
        self.counters["dropped"] += 1

    def _free_rank(self, extent: Extent) -> Rank | None:
        """The rank that an extent is in, if neither it nor any other part is busy with requests."""
        rank = self._home.pools.rank_of(extent)
        is_free = rank is not None and not len(rank.batcher) and self._home.has_time
        return rank if is_free else None

    async def _verify(self, expected: _Expected, supplied: Supplied) -> None:
        fault, outcome = "", "dropped"
        try:
            fault = await self._fault(expected, supplied)
            outcome = "mismatched" if fault else "matched"
        except (*NO_VERDICT, ItemError) as error:
            log.debug("a verification was dropped: %r", error)
        finally:
            self.counters[outcome] += 1
            supplied.memory.release()
        if fault:
            await self._remove(expected, fault)

    async def _fault(self, expected: _Expected, supplied: Supplied) -> str:
        """What is wrong with a cached embedding; empty if nothing is."""
        extent = expected.extent
        rank = self._free_rank(extent)
        if rank is None or extent.key is None or self._home.pools.get(extent.key) is not extent:
            raise _NoVerdictError
        rank.pool.pin(extent)
        try:
            fault = await self._compare(rank, extent, extent.key, supplied)
        finally:
            rank.pool.unpin(extent)
        if self._home.fingerprint != expected.fingerprint:
            raise _NoVerdictError
        return fault

    async def _compare(self, rank: Rank, extent: Extent, key: bytes, supplied: Supplied) -> str:
        pixels = await self._home.decoders.decode(Job(supplied, key, is_urgent=False))
        try:
            if self._home.pools.get(key) is not extent:  # it was removed, or the model changed
                raise _NoVerdictError
            grid, patches, tokens = sizes(pixels, self._home.facts)
            assert isinstance(extent.info, bytes), "it was published with its half of a grant record"
            _, cached_tokens, _, _, *cached_grid = GRANT_EXTENT.unpack(extent.info)
            if (cached_tokens, *cached_grid) != (tokens, *grid):
                return f"it has {cached_tokens} tokens of grid {tuple(cached_grid)}, its item {tokens} of {grid}"
            cost_s = rank.cost.item_seconds(patches)
            if self._free_rank(extent) is not rank or cost_s > MAX_ENCODE_S:
                raise _NoVerdictError
            fresh = rank.pool.reserve(extent.nbytes)
            if fresh is None:
                raise _NoVerdictError
            try:
                job = EncodeJob(pixels, patches, tokens, fresh.nbytes, cost_s)
                await rank.batcher.submit(job.bind(rank, fresh))
                if self._home.pools.get(key) is not extent:
                    raise _NoVerdictError
                return self._judged(await rank.compare(extent, fresh, tokens))
            finally:
                rank.pool.abandon(fresh)
        finally:
            self._home.ingest.free(pixels.part)

    def _judged(self, found: Compared) -> str:
        if not found.is_intact:
            return "its bytes have changed since it was encoded"
        bound = BOUNDS[self._home.facts.dtype]
        is_near = found.relative_error <= bound.relative_error and found.min_cosine >= bound.min_cosine
        if found.is_same_bits or (is_near and not self._home.settings.deterministic):
            return ""
        return f"relative error {found.relative_error:.2e}, least cosine of a token {found.min_cosine:.6f}"

    async def _remove(self, expected: _Expected, fault: str) -> None:
        """Out of the pool at once and out of the store as soon as it can; until then the store's is not believed."""
        assert expected.extent.key is not None, "it was published"
        key = ContentKey(expected.extent.key)
        log.error("the cached embedding of %s differs from a fresh one: %s; it is removed", key, fault)
        self._home.pools.withdraw(expected.extent)
        stored = store_key(expected.fingerprint, key)
        self._condemned[stored] = None
        if len(self._condemned) > MAX_CONDEMNED:
            del self._condemned[next(iter(self._condemned))]
        if await self._home.store.remove(stored):
            self._condemned.pop(stored, None)
        else:
            log.error("the wrong embedding of %s could not be removed from the store: remove the store's file", key)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            log.error("internal error in a verification", exc_info=fault)
            self._home.stats.errors["Internal"] += 1
