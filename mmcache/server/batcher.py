"""Packs what is ready for a rank into microbatches under a patch budget.

Nothing waits while the rank is idle, unless a rate is set that leaves time to whoever shares its device.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ipc.pool import Extent
from mmcache.errors import ContentMismatch, EncodeFailed, NonFiniteEmbedding
from mmcache.server.decoders import Pixels
from mmcache.server.messages import Ran, Run
from mmcache.server.staged import StagedPixels


class RankLostError(Exception):
    """The rank died with the work in its hands; what it wrote is gone with its pool."""


class RecalledError(Exception):
    """The model changed before the work began: nobody writes its extent, which may be of the wrong size now."""


@dataclass(slots=True, eq=False)
class EncodeJob:
    """One item on its way through a rank. `done` gives the seconds that the encode took."""

    pixels: Pixels | StagedPixels
    extent: Extent
    num_patches: int
    num_tokens: int
    cost_s: float
    done: asyncio.Future[float] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Batcher:
    """The queue of one rank. One microbatch is in flight at a time.

    `patches_per_second`: most that are begun, on the mean; 0 for no limit. After a microbatch the next waits until it
    is paid for. `max_patches`: of a microbatch; it may be changed between two.
    `queued_s`: predicted seconds of everything that is queued or in flight.
    """

    def __init__(self, send: Callable[[Run], None], max_patches: int, patches_per_second: int = 0) -> None:
        self._send = send
        self.max_patches = max_patches
        self._patches_per_second = patches_per_second
        self._loop = asyncio.get_running_loop()
        self._not_before = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.num_rests = 0
        self._queue: deque[EncodeJob] = deque()
        self._running: list[EncodeJob] = []
        self._last_batch = 0
        self._paused: asyncio.Future[None] | None = None
        self.queued_s = 0.0
        self.num_batches = 0

    def __len__(self) -> int:
        return len(self._queue) + len(self._running)

    def submit(self, job: EncodeJob) -> asyncio.Future[float]:
        """Queue a job.

        The future raises `NonFiniteEmbedding`, `EncodeFailed` (the batch failed), `RankLostError` or `RecalledError`.
        """
        self._queue.append(job)
        self.queued_s += job.cost_s
        self._pump()
        return job.done

    def ran(self, result: Ran) -> None:
        """The rank's answer: settle the batch in flight and send the next."""
        assert result.batch_id == self._last_batch, "one batch is in flight at a time"
        batch, self._running = self._running, []
        total_s = sum(job.cost_s for job in batch)
        for i, job in enumerate(batch):
            self.queued_s -= job.cost_s
            if i in result.false_claims:
                job.done.set_exception(
                    ContentMismatch("the staged pixels do not hash to their key; nothing was cached")
                )
            elif result.error:
                job.done.set_exception(EncodeFailed(f"the rank failed: {result.error}"))
            elif not result.finite[i]:
                job.done.set_exception(NonFiniteEmbedding("the encoder produced NaN or Inf; nothing was cached"))
            else:
                job.done.set_result(result.seconds * job.cost_s / total_s)
        self._pump()

    async def pause(self) -> None:
        """Begin no batch until `resume`; returns when none is in flight any more."""
        self._paused = asyncio.get_running_loop().create_future()
        self._pump()
        await self._paused

    def resume(self) -> None:
        """Begin batches again."""
        self._paused = None
        self._pump()

    def recall(self) -> None:
        """Every job that is queued ends with `RecalledError`."""
        jobs = list(self._queue)
        self._queue.clear()
        for job in jobs:
            self.queued_s -= job.cost_s
            job.done.set_exception(RecalledError())

    def lose(self) -> None:
        """The rank died: every job ends with `RankLostError`."""
        jobs = [*self._running, *self._queue]
        self._running, self.queued_s = [], 0.0
        self._queue.clear()
        for job in jobs:
            job.done.set_exception(RankLostError())
        self._pump()

    def _pump(self) -> None:
        if self._paused is not None:
            if not self._running and not self._paused.done():
                self._paused.set_result(None)
            return
        if self._running or not self._queue or self._rests():
            return
        patches = 0
        # An item above the budget runs alone.
        while self._queue and (not self._running or patches + self._queue[0].num_patches <= self.max_patches):
            job = self._queue.popleft()
            patches += job.num_patches
            self._running.append(job)
        if self._patches_per_second:
            self._not_before = self._loop.time() + patches / self._patches_per_second
        self._last_batch += 1
        self.num_batches += 1
        batch = self._running
        sizes = [_size(job.pixels) for job in batch]
        staged = [(place, job.pixels) for place, job in enumerate(batch) if isinstance(job.pixels, StagedPixels)]
        run = Run(
            batch_id=self._last_batch,
            sources=[job.pixels.offset for job in batch],
            num_frames=[size[0] for size in sizes],
            heights=[size[1] for size in sizes],
            widths=[size[2] for size in sizes],
            claims={place: pixels.slice.claimed() for place, pixels in staged},
            extents=[job.extent.offset for job in batch],
            num_tokens=[job.num_tokens for job in batch],
        )
        self._send(run)

    def _rests(self) -> bool:
        """Whether what was begun is not paid for yet; then this is looked at again when it is."""
        rest_s = self._not_before - self._loop.time()
        if rest_s <= 0:
            return False
        if self._timer is None:
            self.num_rests += 1
            self._timer = self._loop.call_later(rest_s, self._rested)
        return True

    def _rested(self) -> None:
        self._timer = None
        self._pump()


def _size(pixels: Pixels | StagedPixels) -> tuple[int, int, int]:
    """Frames, height and width of decoded pixels; staged ones say theirs in their header."""
    return (pixels.num_frames, pixels.height, pixels.width) if isinstance(pixels, Pixels) else (0, 0, 0)
