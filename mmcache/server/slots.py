"""A place for a rank, and what became of those that were in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from mmcache.server.children import restart_delay_s
from mmcache.server.pool_memory import PoolMemory

if TYPE_CHECKING:
    from mmcache.server.rank import Rank

Death: TypeAlias = Literal["died", "hung", "start", "spawn", "replaced"]
"""Why a rank is gone: by itself or by another's signal; it made no progress; it was not warm yet; no process could be
made for it; it was in the way of a reload."""

HOPELESS_STARTS = 3
"""So many ranks in a row that did not become warm, and the next is not expected to."""

MAX_REASONS = 4
"""Of an outage; of how many ranks they are told."""


@dataclass(slots=True)
class Slot:
    """One of the sidecar's ranks through all its restarts.

    Attributes:
        rank: the process that is alive, if one is.
        left: memory of a pool that its successor goes on with.
        num_incarnations: processes that were made or tried.
        num_restarts: of those that were lost.
        deaths: by why.
        num_out_of_memory: batches for which there was not enough memory.
        why: the last one was lost; for people.
    """

    index: int
    rank: Rank | None = None
    left: PoolMemory | None = None
    num_incarnations: int = 0
    num_restarts: int = 0
    deaths: Counter[Death] = field(default_factory=Counter)
    num_out_of_memory: int = 0
    why: str = ""
    _idle_deaths: int = 0
    _failed_starts: int = 0

    def next_pool_id(self) -> int:
        """Names the pool of the next process, if that makes one."""
        self.num_incarnations += 1
        return self.num_incarnations << 8 | self.index

    def warmed_up(self) -> None:
        """Its rank is warm: whatever kept it from that is over."""
        self._failed_starts = 0

    def lost(self, why: str, death: Death, *, was_warm: bool, has_worked: bool) -> float:
        """Its rank is gone. Returns the seconds after which the next one is to be started.

        They grow with those in a row that had not answered anything.
        """
        self.rank, self.why = None, why
        self.deaths[death] += 1
        self.num_restarts += 1
        self._failed_starts += not was_warm
        self._idle_deaths = 0 if has_worked else self._idle_deaths
        delay_s = restart_delay_s(self._idle_deaths)
        self._idle_deaths += 1
        return delay_s

    @property
    def hopeless(self) -> str:
        """Why no rank is expected here soon; empty if one is, or is there."""
        if self.rank is not None and self.rank.is_stale:
            return f"the files of {self.rank.model} have changed since it was loaded; `mmcache reload`"
        if self._failed_starts < HOPELESS_STARTS:
            return ""
        return f"the last {self._failed_starts} tries to start one failed: {self.why}"

    @property
    def state(self) -> str:
        """Of its rank, for people."""
        rank = self.rank
        if rank is None:
            return "lost"
        if rank.is_given_up:
            return "ending"
        if rank.is_ready:
            return "ready"
        return "starting" if rank.facts is None else "stale" if rank.is_stale else "warm"

    def counters(self) -> dict[str, object]:
        """For the statistics."""
        rank = self.rank
        return {
            "state": self.state,
            "pid": None if rank is None else rank.child.pid,
            "max_patches": 0 if rank is None else rank.max_patches,
            "restarts": self.num_restarts,
            "deaths": dict(sorted(self.deaths.items())),
            "out_of_memory": self.num_out_of_memory,
            "lost_because": self.why,
        }


def outage(slots: Sequence[Slot]) -> str:
    """Why no rank is expected anywhere soon; empty if one is, or is there."""
    reasons = [(slot.index, slot.hopeless) for slot in slots]
    if not all(reason for _, reason in reasons):
        return ""
    return "; ".join(f"rank {index}: {reason}" for index, reason in reasons[:MAX_REASONS])


def counters(slots: Sequence[Slot]) -> dict[str, object]:
    """Of all ranks together, and of each by its number."""
    deaths = sum((slot.deaths for slot in slots), Counter[Death]())
    return {
        "configured": len(slots),
        "restarts": sum(slot.num_restarts for slot in slots),
        "deaths": dict(sorted(deaths.items())),
        "hung": deaths["hung"],
        "out_of_memory": sum(slot.num_out_of_memory for slot in slots),
        "by_rank": {str(slot.index): slot.counters() for slot in slots},
    }
