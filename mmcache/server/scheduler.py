"""Ready items of all clients in one queue, bound to a rank only when that rank can take them.

Who is next is decided by fair shares, which rank by longest processing time first: of the items that are due, each
goes to the rank that would be done with it soonest, and a rank that is free takes those that fall to it. What falls to
a busy rank stays in the queue and is looked at again, so that a wrong prediction costs nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING

from encoder.sharding import assign
from ipc.errors import ExtentTooLarge
from mmcache.errors import ItemError
from mmcache.server.batcher import EncodeJob, RecalledError
from mmcache.server.fair_queue import FairQueue, Ticket

if TYPE_CHECKING:
    from ipc.pool import Extent
    from mmcache.server.rank import Rank

MAX_LOOKED_AT = 64
"""Items for each rank that are looked at to fill a microbatch, however small they are."""


class NoRoomError(Exception):
    """There is no room for it in the rank's pool, or others wait for room: it has to queue for that first."""


class Scheduler:
    """The queue for ranks. `ready` gives those at work, `is_room_short` says whether anybody waits for room."""

    def __init__(self, ready: Callable[[], list[Rank]], is_room_short: Callable[[], bool], max_patches: int) -> None:
        self._ready = ready
        self._is_room_short = is_room_short
        self._max_patches = max_patches
        self._queue: FairQueue[EncodeJob] = FairQueue()
        self._tickets: dict[EncodeJob, Ticket[EncodeJob]] = {}
        self._loop = asyncio.get_running_loop()
        self._is_kicked = False

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, job: EncodeJob, flow: Hashable, weight: float) -> asyncio.Future[float]:
        """Queue a job that is bound to no rank. It is bound when its turn comes.

        The future is as the batcher says, and raises `NoRoomError` with the job bound to nothing, or what `fail` was
        given.
        """
        self._tickets[job] = self._queue.put(job, flow, weight, job.cost_s)
        self.kick()
        return job.done

    def fail(self, job: EncodeJob, error: Exception) -> None:
        """End a job that is queued, with this error. What a rank has, or is done, is left alone."""
        if (ticket := self._tickets.pop(job, None)) is not None:
            self._queue.remove(ticket)
            job.done.set_exception(error)

    def recall(self) -> None:
        """The model changed: every job that is queued ends with `RecalledError`."""
        for job in list(self._tickets):
            self.fail(job, RecalledError())

    def serve(self, rank: Rank) -> None:
        """Let a rank take from the queue from now on."""
        rank.batcher.supply = lambda room, may_be_alone: self._supply(rank, room, may_be_alone)
        self.kick()

    def kick(self) -> None:
        """There is something new: it is looked at in the loop's next turn, together with what comes until then."""
        if not self._is_kicked:
            self._is_kicked = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._is_kicked = False
        for rank in self._ready():
            if self._tickets and rank.batcher.is_idle:
                rank.batcher.pump()

    def _supply(self, rank: Rank, room: int, may_be_alone: bool) -> Iterator[EncodeJob]:
        """Bind jobs for one microbatch of at most `room` patches; the first may exceed that if it may be alone."""
        if self._is_room_short():  # whoever came first has room first: nobody passes those who wait for it
            for job in list(self._tickets):
                self.fail(job, NoRoomError())
            return
        for job in self._share_of(rank):
            if job.num_patches > room and not may_be_alone:
                continue
            if (extent := _reserved(rank, job.nbytes)) is None:
                self.fail(job, NoRoomError())
                continue
            try:
                job.bind(rank, extent)
            except ItemError as error:
                self.fail(job, error)
                continue
            self._queue.take(self._tickets.pop(job))
            yield job
            room -= job.num_patches
            may_be_alone = False

    def _share_of(self, rank: Rank) -> list[EncodeJob]:
        """Of the jobs that are due, those that fall to a rank, in the order in which they are due."""
        ranks = self._ready()
        if rank not in ranks:
            return []
        most, patches, due = self._max_patches * len(ranks), 0, list[EncodeJob]()
        for ticket in self._queue.ahead():
            patches += ticket.item.num_patches
            if due and (patches > most or len(due) >= MAX_LOOKED_AT * len(ranks)):
                break
            due.append(ticket.item)
        where = assign([job.cost_s for job in due], [one.batcher.left_s for one in ranks])
        return [job for job, place in zip(due, where, strict=True) if ranks[place] is rank]


def _reserved(rank: Rank, nbytes: int) -> Extent | None:
    with contextlib.suppress(ExtentTooLarge):  # for this pool; it may fit into another
        return rank.pool.reserve(nbytes)
    return None
