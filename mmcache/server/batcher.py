"""What one rank has in its hands: microbatches in flight, and what is bound to it and goes into the next."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mmcache.errors import ContentMismatch, NonFiniteEmbedding
from mmcache.server.messages import Ran, Run
from mmcache.server.microbatch import EncodeJob, Microbatch, run_of

LEAD_S = 0.002
"""Where two microbatches may be in flight, the second follows this long before the first is predicted to be done: late
enough to be well filled, early enough that the device never waits for the coordinator."""
MIN_LEFT = 0.1
"""A microbatch that takes longer than predicted is predicted to take this part of its prediction more: what is free
comes before it."""


class RankLostError(Exception):
    """The rank died; what it wrote is gone with its pool. `had_begun`: with this work in its hands."""

    def __init__(self, *, had_begun: bool = True) -> None:
        super().__init__("the rank died")
        self.had_begun = had_begun


class RecalledError(Exception):
    """The model changed before the work began: nobody writes its extent, which may be of the wrong size now."""


class BatchFailedError(Exception):
    """The rank could not encode the microbatch that an item was in, and lives on.

    Attributes:
        is_memory: whether it ran out of memory.
        num_items, num_patches: of the microbatch.
    """

    def __init__(self, reason: str, *, is_memory: bool, num_items: int, num_patches: int) -> None:
        super().__init__(reason)
        self.is_memory = is_memory
        self.num_items = num_items
        self.num_patches = num_patches


class _InFlight(NamedTuple):
    batch_id: int
    batch: Microbatch
    cost_s: float


class Batcher:
    """Begins microbatches of what is bound to a rank, and of what it is supplied with.

    One is in flight at a time, or two where the second hides the way there and back (`LEAD_S`). `patches_per_second`:
    most that are begun, on the mean; 0 for no limit. After a microbatch the next waits until it is paid for.

    Attributes:
        max_patches: of a microbatch; it may be changed between two.
        supply: asked to add jobs to a microbatch that can begin; there is none before the rank is at work.
        on_begin: told of each that begins.
        on_done: told of each that was encoded whole: patches of its items, and seconds.
        has_just_finished: whether the microbatch that can begin follows one that was in flight until now.
        queued_s: predicted seconds of all that is bound to the rank or in flight.
    """

    def __init__(
        self, send: Callable[[Run], None], max_patches: int, patches_per_second: int = 0, max_in_flight: int = 1
    ) -> None:
        self._send = send
        self.max_patches = max_patches
        self._patches_per_second = patches_per_second
        self._max_in_flight = max_in_flight
        self._loop = asyncio.get_running_loop()
        self.supply: Callable[[Microbatch], None] = lambda _: None
        self.on_begin: Callable[[Microbatch], None] = lambda _: None
        self.on_done: Callable[[Sequence[int], float], None] = lambda _patches, _seconds: None
        self.has_just_finished = False
        self._queue: dict[EncodeJob, None] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._head_since_s = 0.0
        self._not_before_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._paused: asyncio.Future[None] | None = None
        self.queued_s = 0.0
        self.num_batches = 0
        self.num_rests = 0

    def __len__(self) -> int:
        return len(self._queue) + sum(len(flying.batch.jobs) for flying in self._in_flight)

    @property
    def is_idle(self) -> bool:
        """Whether a microbatch could begin at once."""
        return self._paused is None and len(self._in_flight) < self._max_in_flight and self._wait_s() <= 0

    @property
    def left_s(self) -> float:
        """Predicted seconds until all that it has is done; more than nothing if it has anything."""
        rest_s = max(self._not_before_s - self._loop.time(), 0.0)
        if not self._in_flight:
            return rest_s + max(self.queued_s, 0.0)
        head_s = self._in_flight[0].cost_s
        return max(self._head_left_s(), head_s * MIN_LEFT, 1e-6) + max(self.queued_s - head_s, 0.0) + rest_s

    def submit(self, job: EncodeJob) -> asyncio.Future[float]:
        """Queue a job that is bound to this rank; such jobs come first.

        The future raises `NonFiniteEmbedding`, `ContentMismatch`, `BatchFailedError`, `RankLostError`, `RecalledError`,
        or what `withdraw` was given.
        """
        self._queue[job] = None
        self.queued_s += job.cost_s
        self.pump()
        return job.done

    def withdraw(self, job: EncodeJob, error: Exception) -> None:
        """End a job that has not begun, with this error; what has begun is left alone."""
        if job in self._queue:
            del self._queue[job]
            self.queued_s -= job.cost_s
            job.fail(error)

    def ran(self, result: Ran) -> None:
        """The rank's answer: settle the first batch in flight and send the next."""
        batch_id, batch, cost_s = self._in_flight.popleft()
        assert result.batch_id == batch_id, "a rank answers in order"
        self.queued_s -= cost_s
        self._head_since_s = self._loop.time()
        patches = [job.num_patches for job in batch.jobs]
        if not (result.error or result.failure or result.false_claims):
            self.on_done(patches, result.seconds)
        for place, job in enumerate(batch.jobs):
            _settle(job, place, batch, result, result.seconds * (job.cost_s / cost_s if cost_s else 1 / len(patches)))
        self.has_just_finished = True
        self.pump()
        self.has_just_finished = False

    async def pause(self) -> None:
        """Begin no batch until `resume`; returns when none is in flight any more."""
        self._paused = asyncio.get_running_loop().create_future()
        self.pump()
        await self._paused

    def resume(self) -> None:
        """Begin batches again."""
        self._paused = None
        self.pump()

    def recall(self) -> None:
        """Every job that has not begun ends with `RecalledError`."""
        for job in list(self._queue):
            self.withdraw(job, RecalledError())

    def lose(self) -> None:
        """The rank died: every job ends with `RankLostError`."""
        begun = [job for flying in self._in_flight for job in flying.batch.jobs]
        waiting = list(self._queue)
        self._in_flight.clear()
        self._queue.clear()
        self.queued_s = 0.0
        for job in begun:
            job.fail(RankLostError())
        for job in waiting:
            job.fail(RankLostError(had_begun=False))
        self.pump()

    def pump(self) -> None:
        """Begin a microbatch, if that can be and there is something to do."""
        if self._paused is not None:
            if not self._in_flight and not self._paused.done():
                self._paused.set_result(None)
            return
        if len(self._in_flight) >= self._max_in_flight:
            return
        if (wait_s := self._wait_s()) > 0:
            self._look_in(wait_s)
            return
        batch = Microbatch(self.max_patches)
        while self._queue and batch.takes(job := next(iter(self._queue))):
            del self._queue[job]
            self.queued_s -= job.cost_s
            batch.add(job)
        self.supply(batch)
        if batch.jobs:
            self._begin(batch)

    def _begin(self, batch: Microbatch) -> None:
        now = self._loop.time()
        if not self._in_flight:
            self._head_since_s = now
        if self._patches_per_second:
            self._not_before_s = now + batch.num_patches / self._patches_per_second
        cost_s = sum(job.cost_s for job in batch.jobs)
        self.queued_s += cost_s
        self.num_batches += 1
        self._in_flight.append(_InFlight(self.num_batches, batch, cost_s))
        self.on_begin(batch)
        self._send(run_of(self.num_batches, batch.jobs))
        if len(self._in_flight) < self._max_in_flight:
            self._look_in(self._wait_s())

    def _head_left_s(self) -> float:
        return self._in_flight[0].cost_s - (self._loop.time() - self._head_since_s)

    def _wait_s(self) -> float:
        """Seconds until a microbatch may begin: what was begun is paid for, and what is in flight is nearly done."""
        wait_s = self._not_before_s - self._loop.time()
        return max(wait_s, self._head_left_s() - LEAD_S) if self._in_flight else wait_s

    def _look_in(self, wait_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(wait_s, self._look)

    def _look(self) -> None:
        self._timer = None
        is_rest, num_batches = not self._in_flight, self.num_batches
        self.pump()
        self.num_rests += is_rest and self.num_batches > num_batches  # somebody waited for it


def _settle(job: EncodeJob, place: int, batch: Microbatch, result: Ran, seconds: float) -> None:
    if place in result.false_claims:
        job.fail(ContentMismatch("the staged pixels do not hash to their key; nothing was cached"))
    elif result.error or result.failure:
        job.fail(
            BatchFailedError(
                result.error, is_memory=result.failure == "memory", num_items=len(batch.jobs),
                num_patches=batch.num_patches,
            )
        )  # fmt: skip
    elif not result.finite[place]:
        job.fail(NonFiniteEmbedding("the encoder produced NaN or Inf; nothing was cached"))
    elif not job.done.done():
        if result.digests and job.extent is not None:
            job.extent.digest = result.digests[place]
        job.done.set_result(seconds)
