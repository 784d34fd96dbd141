"""Whether and how an item is tried again after the rank that had it died, or the microbatch that it was in failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmcache.errors import EncodeFailed
from mmcache.server.batcher import BatchFailedError, RankLostError

if TYPE_CHECKING:
    from mmcache.server.rank import Rank

MAX_TRIES = 2
"""Of one item with one model, not counting those whose failure may be its neighbours' doing alone."""
ALONE = 1
"""A limit of patches under which nothing fits beside an item."""


class Retries:
    """Of one item with one model.

    After a death or an error it is tried alone: whoever is to blame does no further harm. After a microbatch that was
    too large for the memory, in one of at most half the patches. Elsewhere, if another rank is ready.

    Attributes:
        limit_patches: of the microbatch that it may be in next; 0 for no such limit.
        avoid: the rank that it failed on, if that lives.
    """

    def __init__(self) -> None:
        self._num_failures = 0
        self.limit_patches = 0
        self.avoid: Rank | None = None

    def failed(self, failure: BatchFailedError | RankLostError, rank: Rank | None) -> None:
        """A try failed on a rank.

        Raises:
            EncodeFailed: it was the last.
        """
        if isinstance(failure, RankLostError):
            if failure.had_begun:
                self._count("the ranks died while encoding it")
            return
        self.avoid = rank
        if failure.is_memory and failure.num_items > 1:
            self.limit_patches = max(failure.num_patches // 2, ALONE)
        elif failure.is_memory:
            self._count(f"the ranks have not the memory that it takes: {failure}")
        else:
            self._count(f"the rank failed: {failure}")

    def _count(self, reason: str) -> None:
        self._num_failures += 1
        self.limit_patches = ALONE
        if self._num_failures >= MAX_TRIES:
            raise EncodeFailed(reason)
