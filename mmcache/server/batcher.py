"""What one rank has in its hands: microbatches under a patch budget, and what is bound to it and goes into the next.

Nothing waits while the rank is idle, unless a rate is set that leaves time to whoever shares its device.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mmcache.errors import ContentMismatch, EncodeFailed, NonFiniteEmbedding
from mmcache.server.decoders import Pixels
from mmcache.server.messages import Ran, Run
from mmcache.server.staged import StagedPixels

if TYPE_CHECKING:
    from ipc.pool import Extent
    from mmcache.server.flight import Flight
    from mmcache.server.rank import Rank


class RankLostError(Exception):
    """The rank died with the work in its hands; what it wrote is gone with its pool."""


class RecalledError(Exception):
    """The model changed before the work began: nobody writes its extent, which may be of the wrong size now."""


@dataclass(slots=True, eq=False)
class EncodeJob:
    """One item on its way through a rank.

    Attributes:
        nbytes: of its embedding.
        rank, extent: who encodes it and where it is written, once it is bound.
        flight: that waits for it, if one does.
        done: gives the seconds that the encode took.
    """

    pixels: Pixels | StagedPixels
    num_patches: int
    num_tokens: int
    nbytes: int
    cost_s: float
    flight: Flight | None = None
    rank: Rank | None = None
    extent: Extent | None = None
    done: asyncio.Future[float] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def bind(self, rank: Rank, extent: Extent) -> EncodeJob:
        """It is this rank's from now on. Raises `SliceGone` if its staged pixels are over; it is bound even so."""
        self.rank, self.extent = rank, extent
        if self.flight is not None:
            self.flight.extent = extent
        if isinstance(self.pixels, StagedPixels):
            self.pixels.slice.begin_read()
        return self


class Batcher:
    """One microbatch is in flight at a time.

    `supply` is asked for jobs whenever a microbatch can begin: for as many patches as there are left of it, and whether
    one job alone may exceed that. `patches_per_second`: most that are begun, on the mean; 0 for no limit. After a
    microbatch the next waits until it is paid for. `max_patches`: of a microbatch; it may be changed between two.

    Attributes:
        queued_s: predicted seconds of all that is bound to the rank or in flight.
        supply: see above; there is none before the rank is at work.
    """

    def __init__(self, send: Callable[[Run], None], max_patches: int, patches_per_second: int = 0) -> None:
        self._send = send
        self.max_patches = max_patches
        self._patches_per_second = patches_per_second
        self._loop = asyncio.get_running_loop()
        self._not_before = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.supply: Callable[[int, bool], Iterable[EncodeJob]] = lambda _room, _alone: ()
        self.num_rests = 0
        self._queue: deque[EncodeJob] = deque()
        self._running: list[EncodeJob] = []
        self._began_s = 0.0
        self._last_batch = 0
        self._paused: asyncio.Future[None] | None = None
        self.queued_s = 0.0
        self.num_batches = 0

    def __len__(self) -> int:
        return len(self._queue) + len(self._running)

    @property
    def is_idle(self) -> bool:
        """Whether a microbatch could begin at once."""
        return not self._running and self._paused is None and self._loop.time() >= self._not_before

    @property
    def left_s(self) -> float:
        """Predicted seconds until all that it has is done."""
        passed = self._loop.time() - self._began_s if self._running else 0.0
        running_s = sum(job.cost_s for job in self._running)
        return max(self.queued_s - min(passed, running_s), 0.0) + max(self._not_before - self._loop.time(), 0.0)

    @property
    def running_patches(self) -> list[int]:
        """Patches of each item of the batch in flight."""
        return [job.num_patches for job in self._running]

    def submit(self, job: EncodeJob) -> asyncio.Future[float]:
        """Queue a job that is bound to this rank; such jobs come first.

        The future raises `NonFiniteEmbedding`, `EncodeFailed` (the batch failed), `RankLostError` or `RecalledError`.
        """
        self._queue.append(job)
        self.queued_s += job.cost_s
        self.pump()
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
                job.done.set_result(result.seconds * (job.cost_s / total_s if total_s else 1 / len(batch)))
        self.pump()

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
        self.pump()

    def pump(self) -> None:
        """Begin a microbatch, if that can be and there is something to do."""
        if self._paused is not None:
            if not self._running and not self._paused.done():
                self._paused.set_result(None)
            return
        if self._running or self._rests():
            return
        batch: list[EncodeJob] = []
        patches = 0
        while self._queue and (not batch or patches + self._queue[0].num_patches <= self.max_patches):
            job = self._queue.popleft()
            patches += job.num_patches
            batch.append(job)
        for job in self.supply(self.max_patches - patches, not batch):
            patches += job.num_patches
            self.queued_s += job.cost_s
            batch.append(job)
        if batch:
            self._begin(batch, patches)

    def _begin(self, batch: list[EncodeJob], patches: int) -> None:
        self._running, self._began_s = batch, self._loop.time()
        if self._patches_per_second:
            self._not_before = self._began_s + patches / self._patches_per_second
        self._last_batch += 1
        self.num_batches += 1
        self._send(run_of(self._last_batch, batch))

    def _rests(self) -> bool:
        """Whether what was begun is not paid for yet; then this is looked at again when it is."""
        rest_s = self._not_before - self._loop.time()
        if rest_s <= 0:
            return False
        if self._timer is None:
            self._timer = self._loop.call_later(rest_s, self._rested)
        return True

    def _rested(self) -> None:
        self._timer = None
        num_batches = self.num_batches
        self.pump()
        self.num_rests += self.num_batches > num_batches  # somebody waited for it


def run_of(batch_id: int, batch: list[EncodeJob]) -> Run:
    """What the rank is told of a microbatch."""
    sizes = [_size(job.pixels) for job in batch]
    staged = [(place, job.pixels) for place, job in enumerate(batch) if isinstance(job.pixels, StagedPixels)]
    extents = [job.extent.offset for job in batch if job.extent is not None]
    assert len(extents) == len(batch), "what is bound to a rank has its extent"
    return Run(
        batch_id=batch_id,
        sources=[job.pixels.offset for job in batch],
        num_frames=[size[0] for size in sizes],
        heights=[size[1] for size in sizes],
        widths=[size[2] for size in sizes],
        claims={place: pixels.slice.claimed() for place, pixels in staged},
        extents=extents,
        num_tokens=[job.num_tokens for job in batch],
    )


def _size(pixels: Pixels | StagedPixels) -> tuple[int, int, int]:
    """Frames, height and width of decoded pixels; staged ones say theirs in their header."""
    return (pixels.num_frames, pixels.height, pixels.width) if isinstance(pixels, Pixels) else (0, 0, 0)
