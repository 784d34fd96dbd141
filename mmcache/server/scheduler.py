"""Ready items of all clients in one queue, bound to a rank only when that rank can take them.

Who is next is decided by fair shares, which rank by longest processing time first: of the items that are due, each
goes to the rank that would be done with it soonest, and a rank that is free takes those that fall to it. What falls to
a busy rank stays in the queue and is looked at again, so that a wrong prediction costs nothing. Balance matters at the
end of a queue and fairness in front of a long one: while more is queued than the ranks can take, whoever is next goes
to the rank that is free, and nobody who is next is passed twice.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from encoder.sharding import CostModel, assign
from ipc.errors import ExtentTooLarge
from mmcache.errors import ItemError
from mmcache.server.batch_counters import BatchCounters
from mmcache.server.batcher import RecalledError
from mmcache.server.costs import Predictor
from mmcache.server.fair_queue import FairQueue, Ticket
from mmcache.server.fill_wait import Announcement, FillWait
from mmcache.server.flows import CLASSES, Flow
from mmcache.server.microbatch import EncodeJob, Microbatch

if TYPE_CHECKING:
    from ipc.pool import Extent
    from mmcache.server.rank import Rank

MAX_LOOKED_AT = 64
"""Items for each rank that are looked at to fill a microbatch, however small they are."""
MEAN_OVER = 32
"""Items over which the mean cost is taken."""
MIN_HINT_S, MAX_HINT_S = 0.05, 30.0


class NoRoomError(Exception):
    """There is no room for it in the rank's pool, or others wait for room: it has to queue for that first."""


class Scheduler:
    """The queue for ranks. `ready` gives those at work, `is_room_short` says whether anybody waits for room.

    `fill_wait_s`: longest that a rank which has just finished waits for what is announced.
    """

    def __init__(
        self, ready: Callable[[], list[Rank]], is_room_short: Callable[[], bool], max_patches: int,
        fill_wait_s: float = 0.0,
    ) -> None:  # fmt: skip
        self._ready = ready
        self._is_room_short = is_room_short
        self._max_patches = max_patches
        self._queue: FairQueue[EncodeJob] = FairQueue()
        self._tickets: dict[EncodeJob, Ticket[EncodeJob]] = {}
        self._num_queued = [0] * len(CLASSES)
        self._queued_s = self._mean_s = 0.0
        self._cost = Predictor(CostModel(0.0, 0.0, 0.0))
        self._loop = asyncio.get_running_loop()
        self._is_kicked = False
        self._fill_wait = FillWait(fill_wait_s, self.kick)
        self.batches = BatchCounters()

    def __len__(self) -> int:
        return len(self._queue)

    def item_seconds(self, patches: int) -> float:
        """Predicted seconds of an item, wherever it will be encoded; of no rank yet, nothing."""
        if ranks := self._ready():
            self._cost = ranks[0].cost
        return self._cost.item_seconds(patches)

    def seconds_for(self, num_items: int) -> float:
        """When the ranks should have encoded so many more items, in seconds: a hint for whoever is to come again."""
        seconds = num_items * self._mean_s / max(1, len(self._ready()))
        return min(max(seconds, MIN_HINT_S), MAX_HINT_S)

    def announce(self) -> Announcement:
        """An item will be ready soon: whoever announces it says its size, and withdraws it when it is put, or fails."""
        return Announcement(self._fill_wait)

    def put(self, job: EncodeJob, flow: Flow) -> asyncio.Future[float]:
        """Queue a job that is bound to no rank. It is bound when its turn comes.

        The future is as the batcher says, and raises `NoRoomError` with the job bound to nothing, or what `give_up` was
        given.
        """
        job.priority, job.queued_at_s = flow.priority, self._loop.time()
        self._tickets[job] = self._queue.put(job, flow.owner, flow.weight, job.cost_s)
        self._num_queued[flow.priority] += 1
        self._queued_s += job.cost_s
        self._mean_s += (job.cost_s - self._mean_s) / (MEAN_OVER if self._mean_s else 1)
        self.kick()
        return job.done

    def move(self, job: EncodeJob, flow: Flow) -> None:
        """Somebody else waits for a job from now on. Nothing happens to one that is bound."""
        if (ticket := self._tickets.get(job)) is not None:
            self._queue.move(ticket, flow.owner, flow.weight)
            self._num_queued[job.priority] -= 1
            self._num_queued[flow.priority] += 1
            job.priority = flow.priority

    def give_up(self, job: EncodeJob, error: Exception) -> None:
        """End a job that has not begun, with this error, wherever it waits. What has begun is left alone."""
        if (ticket := self._tickets.get(job)) is not None:
            self._queue.remove(ticket)
            self._left(job)
            job.fail(error)
        elif job.rank is not None:
            job.rank.batcher.withdraw(job, error)

    def recall(self) -> None:
        """The model changed: every job that is queued ends with `RecalledError`."""
        for job in list(self._tickets):
            self.give_up(job, RecalledError())

    def serve(self, rank: Rank) -> None:
        """Let a rank take from the queue from now on."""
        rank.batcher.supply = partial(self._fill, rank)
        rank.batcher.on_begin = partial(self._began, rank)
        rank.batcher.on_done = partial(self._encoded, rank)
        self.kick()

    def kick(self) -> None:
        """There is something new: it is looked at in the loop's next turn, together with what comes until then."""
        if not self._is_kicked:
            self._is_kicked = True
            self._loop.call_soon(self._look)

    def counters(self) -> dict[str, object]:
        """Of what is queued now, for the statistics."""
        return {
            **dict(zip(CLASSES, self._num_queued, strict=True)),
            "seconds": round(max(self._queued_s, 0.0), 6),
            "announced_patches": self._fill_wait.num_patches,
        }

    def batch_counters(self) -> dict[str, object]:
        """Of microbatches, for the statistics."""
        return {**self.batches.counters(), "fill_waits": self._fill_wait.num_waits}

    def _look(self) -> None:
        self._is_kicked = False
        for rank in self._ready():
            if self._tickets and rank.batcher.is_idle:
                rank.batcher.pump()

    def _began(self, rank: Rank, batch: Microbatch) -> None:
        self.batches.began(batch, rank.batcher.max_patches, self._loop.time())

    def _encoded(self, rank: Rank, patches: Sequence[int], seconds: float) -> None:
        rank.cost.observe(patches, seconds)
        self.batches.done(patches, seconds)

    def _fill(self, rank: Rank, batch: Microbatch) -> None:
        """Bind jobs for a microbatch that can begin."""
        if not self._tickets:
            return
        if self._is_room_short():  # whoever came first has room first: nobody passes those who wait for it
            for job in list(self._tickets):
                self.give_up(job, NoRoomError())
            return
        ranks = self._ready()
        if rank not in ranks:
            return
        due, is_long = self._due(len(ranks))
        share = _share_of(rank, ranks, due, sum(job.cost_s for job in batch.jobs), is_long=is_long)
        if not batch.jobs and self._waits(rank, len(ranks), share, due):
            return
        bound = [job for job in share if batch.takes(job) and self._bind(rank, job, batch)]
        self._queue.take_all([self._tickets[job] for job in bound])
        for job in bound:
            self._left(job)
        due[0].was_passed = True

    def _waits(self, rank: Rank, num_ranks: int, share: Sequence[EncodeJob], due: Sequence[EncodeJob]) -> bool:
        """Whether a microbatch waits to be filled."""
        if not self._fill_wait.num_patches:
            return False
        num_ready, num_due = (sum(job.num_patches for job in jobs) for jobs in (share, due))
        num_wanted = -(-(num_due + self._fill_wait.num_patches) // num_ranks)
        return self._fill_wait.holds(rank.batcher, num_ready, min(num_wanted, rank.batcher.max_patches))

    def _due(self, num_ranks: int) -> tuple[list[EncodeJob], bool]:
        """What is next, as much as the ranks could take at once, and whether more than that is queued."""
        most, patches, due = self._max_patches * num_ranks, 0, list[EncodeJob]()
        for ticket in self._queue.ahead():
            patches += ticket.item.num_patches
            if due and (patches > most or len(due) >= MAX_LOOKED_AT * num_ranks):
                return due, True
            due.append(ticket.item)
        return due, False

    def _bind(self, rank: Rank, job: EncodeJob, batch: Microbatch) -> bool:
        """Whether it is in the microbatch; else it has left the queue."""
        if (extent := _reserved(rank, job.nbytes)) is None:
            self.give_up(job, NoRoomError())
            return False
        try:
            job.bind(rank, extent)
        except ItemError as error:
            self.give_up(job, error)
            return False
        batch.add(job)
        return True

    def _left(self, job: EncodeJob) -> None:
        del self._tickets[job]
        self._num_queued[job.priority] -= 1
        self._queued_s -= job.cost_s


def _share_of(
    rank: Rank, ranks: Sequence[Rank], due: Sequence[EncodeJob], begun_s: float, *, is_long: bool
) -> list[EncodeJob]:
    """Of the jobs that are due, those that fall to a free rank, in the order in which they are due.

    `begun_s`: predicted seconds of what it has for its microbatch already.
    """
    if len(ranks) == 1:
        return list(due)
    loads = [one.batcher.left_s + (begun_s if one is rank else 0.0) for one in ranks]
    mine: set[EncodeJob] = set()
    others: list[EncodeJob] = []
    for job in due:
        avoids = job.avoid in ranks and len(ranks) > 1
        if avoids and job.avoid is rank:
            continue
        if avoids or (job is due[0] and (is_long or job.was_passed)):
            mine.add(job)
            loads[ranks.index(rank)] += job.cost_s
        else:
            others.append(job)
    where = assign([job.cost_s for job in others], loads)
    mine.update(job for job, place in zip(others, where, strict=True) if ranks[place] is rank)
    return [job for job in due if job in mine]


def _reserved(rank: Rank, nbytes: int) -> Extent | None:
    with contextlib.suppress(ExtentTooLarge):  # for this pool; it may fit into another
        return rank.pool.reserve(nbytes)
    return None
