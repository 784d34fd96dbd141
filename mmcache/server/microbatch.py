"""What a rank is given at once: jobs, and how they are packed under a patch budget."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mmcache.server.decoders import Pixels
from mmcache.server.flows import INTERACTIVE
from mmcache.server.messages import Run
from mmcache.server.staged import StagedPixels

if TYPE_CHECKING:
    from ipc.pool import Extent
    from mmcache.server.flight import Flight
    from mmcache.server.rank import Rank


@dataclass(slots=True, eq=False)
class EncodeJob:
    """One item on its way through a rank.

    Attributes:
        nbytes: of its embedding.
        cost_s: predicted seconds.
        flight: that waits for it, if one does.
        limit_patches: of the microbatch that it is in, after one that it was in has failed; 0 for no such limit.
        avoid: a rank that it failed on: another one is to have it, if there is one.
        rank, extent: who encodes it and where it is written, once it is bound.
        priority, queued_at_s: of the scheduler's queue, and by the loop's clock when it entered that.
        was_passed: whether it was the next and something else was begun.
        done: gives the seconds that the encode took.
    """

    pixels: Pixels | StagedPixels
    num_patches: int
    num_tokens: int
    nbytes: int
    cost_s: float
    flight: Flight | None = None
    limit_patches: int = 0
    avoid: Rank | None = None
    rank: Rank | None = None
    extent: Extent | None = None
    priority: int = INTERACTIVE
    queued_at_s: float | None = None
    was_passed: bool = False
    done: asyncio.Future[float] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def bind(self, rank: Rank, extent: Extent) -> EncodeJob:
        """It is this rank's from now on. Raises `SliceGone` if its staged pixels are over; it is bound even so."""
        self.rank, self.extent = rank, extent
        if self.flight is not None:
            self.flight.extent, self.flight.stage = extent, "encoded"
        if isinstance(self.pixels, StagedPixels):
            self.pixels.slice.begin_read()
        return self

    def fail(self, error: Exception) -> None:
        """End with an error, if it has not ended."""
        if not self.done.done():
            self.done.set_exception(error)


class Microbatch:
    """Jobs for one launch, within a budget of patches and their own limits. A job above them is alone.

    Attributes:
        jobs: in the order in which they were added.
        num_patches: of all of them.
    """

    __slots__ = ("_most", "jobs", "num_patches")

    def __init__(self, max_patches: int) -> None:
        self.jobs: list[EncodeJob] = []
        self.num_patches = 0
        self._most = max_patches

    def takes(self, job: EncodeJob) -> bool:
        """Whether there is room for one more."""
        most = min(self._most, job.limit_patches) if job.limit_patches else self._most
        return not self.jobs or self.num_patches + job.num_patches <= most

    def add(self, job: EncodeJob) -> None:
        """One more; there is room for it."""
        self.jobs.append(job)
        self.num_patches += job.num_patches
        if job.limit_patches:
            self._most = min(self._most, job.limit_patches)


def run_of(batch_id: int, jobs: Sequence[EncodeJob]) -> Run:
    """What the rank is told of a microbatch."""
    sizes = [_size(job.pixels) for job in jobs]
    staged = [(place, job.pixels) for place, job in enumerate(jobs) if isinstance(job.pixels, StagedPixels)]
    extents = [job.extent.offset for job in jobs if job.extent is not None]
    assert len(extents) == len(jobs), "what is bound to a rank has its extent"
    return Run(
        batch_id=batch_id,
        sources=[job.pixels.offset for job in jobs],
        num_frames=[size[0] for size in sizes],
        heights=[size[1] for size in sizes],
        widths=[size[2] for size in sizes],
        claims={place: pixels.slice.claimed() for place, pixels in staged},
        extents=extents,
        num_tokens=[job.num_tokens for job in jobs],
    )


def _size(pixels: Pixels | StagedPixels) -> tuple[int, int, int]:
    """Frames, height and width of decoded pixels; staged ones say theirs in their header."""
    return (pixels.num_frames, pixels.height, pixels.width) if isinstance(pixels, Pixels) else (0, 0, 0)
