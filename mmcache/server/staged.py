"""A deferred slice as the coordinator sees it: who may name it, what it claims to be, and when it is over.

It is read by one rank, once, if its key has no embedding; else it is acknowledged unread for all its consumers. Then
its embedding is kept for those that have not come yet, until they have, or who staged it cancels or leaves.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, NamedTuple

from encoder.sizing import Grid
from ipc.pool import Extent, Pool
from ipc.staging import Staged, StagedState
from mmcache.errors import (
    DeadlineExceeded,
    ItemError,
    NoRanks,
    Overloaded,
    PoolExhausted,
    SliceGone,
    TooManyLeases,
)
from mmcache.records import NO_KEY
from mmcache.server.messages import Claim
from mmcache.server.staged_headers import staged_grid

if TYPE_CHECKING:
    from mmcache.server.facts import ModelFacts
    from mmcache.server.staging_area import StagingArea

ALL_CAME = "the staged pixels were named by as many requests as they were staged for (consumers)"
EMBEDDING_LOST = "the embedding of the staged pixels went with its rank or its model, and the pixels are gone"
OVER = (
    "the staged pixels are gone: they were cancelled, their embedding went with its rank or its model, or the process "
    "that staged them is gone"
)
PASSING = (DeadlineExceeded, NoRanks, Overloaded, PoolExhausted, TooManyLeases)
"""Errors of one request that say nothing about the pixels."""


class Kept(NamedTuple):
    """The embedding of staged pixels, pinned in its pool for consumers that have not come yet.

    `since`: when, on the monotonic clock, in seconds.
    """

    pool: Pool
    extent: Extent
    since: float


class StagedSlice:
    """One staged item. Its bytes are a claim until a rank has hashed what it read.

    Attributes:
        token: names it.
        key, kind, header: what it claims to be.
        kept: its embedding, while consumers may come for it.
        num_active: positions that wait for its embedding.
    """

    def __init__(self, area: StagingArea, token: int, staged: Staged, key: bytes, kind: str, header: bytes) -> None:
        self.area = area
        self.token = token
        self.key = key
        self.kind = kind
        self.header = header
        self.staged = staged
        self.num_active = 0
        self._num_claimed = 0
        self._is_cached = False
        self.kept: Kept | None = None
        self._why = ""
        self.changed = asyncio.Event()

    @property
    def num_to_come(self) -> int:
        """Consumers that may come yet."""
        return self.staged.consumers - self._num_claimed

    @property
    def is_over(self) -> bool:
        """Whether nobody can get anything by it any more."""
        return bool(self._why)

    @property
    def is_written(self) -> bool:
        """Whether its client has said that it is complete."""
        return self.staged.state is not StagedState.WRITING

    def claim(self) -> None:
        """One of its consumers came.

        Raises:
            SliceGone: it is over, or all of them came before.
        """
        if self._why:
            raise SliceGone(self._why)
        if self._num_claimed == self.staged.consumers:
            raise SliceGone(ALL_CAME)
        self._num_claimed += 1
        if self.staged.state in (StagedState.STAGED, StagedState.READING):
            self.staged.claim()

    @property
    def has_key(self) -> bool:
        """Whether its client has hashed it by now."""
        return self.key != NO_KEY

    def written(self, key: bytes = NO_KEY) -> None:
        """Its client wrote all of it, and hashed it now, if it had not before."""
        if self.staged.state is not StagedState.WRITING:
            return
        if self._why:
            self.end(self._why)
            return
        if not self.has_key:
            self.key = key
        self.staged.complete()
        for _ in range(self._num_claimed):
            self.staged.claim()
        self.changed.set()
        self._settle()

    def cached(self, pool: Pool, extent: Extent) -> None:
        """Its key has an embedding: nobody needs the bytes, and the embedding is kept for who comes later.

        Nothing happens if it is not known yet whether this is its key.
        """
        if extent.key != self.key:
            return
        self._is_cached = True
        if self.kept is None and not self._why and self.num_to_come:
            pool.pin(extent)
            self.kept = Kept(pool, extent, time.monotonic())
        self._settle()

    def ended(self, error: ItemError | None) -> None:
        """A position that waited does not any more: it has its embedding, its error, or was given up (None)."""
        self.num_active -= 1
        if error is not None and not isinstance(error, PASSING):
            self.end(f"the staged pixels have no embedding: {error.reason}", is_fault=True)
        else:
            self._settle()

    def begin_read(self) -> None:
        """A rank is about to read it; again if the one before died.

        Raises:
            SliceGone: it is over.
        """
        if self._why:
            raise SliceGone(self._why)
        if self.staged.state is StagedState.STAGED:
            self.staged.begin_read()
        elif self.staged.state is not StagedState.READING:
            raise SliceGone(EMBEDDING_LOST)

    def end_read(self) -> None:
        """No rank reads it any more."""
        if self.staged.state is StagedState.READING:
            self.staged.end_read()
            self.area.freed()
            if not self._is_cached:
                self.end("the staged pixels were read, and the request that needed them ended", is_fault=True)
        self._settle()

    def end(self, why: str, *, is_fault: bool = False) -> None:
        """It is over. What is being read or written goes on until its reader or its client is done."""
        is_writing = self.staged.state is StagedState.WRITING
        if self._why and not is_writing:
            return
        self._why = self._why or why
        if is_fault and is_writing:
            self._unpin()
            self.changed.set()
            return
        if is_fault:
            if self.staged.state is not StagedState.READING:
                self.staged.fail()
        else:
            self.staged.cancel()
        self._drop()

    def let_go(self, why: str) -> None:
        """Its embedding is not kept any more. Without its pixels it is over then."""
        self._is_cached = False
        if self.staged.state in (StagedState.WRITING, StagedState.READING):
            self._unpin()
        else:
            self.end(why, is_fault=True)

    def left(self) -> None:
        """Its client has left, which has ended the slice itself."""
        self._why = self._why or OVER
        self._drop()

    def claimed(self) -> Claim:
        """What the rank checks."""
        area = self.area
        return Claim(region=area.region_id, key=self.key, namespace=area.namespace, kind=self.kind, header=self.header)

    def _settle(self) -> None:
        if self._is_cached and self.staged.acknowledge():
            self.area.freed()
        everyone_came = self._num_claimed == self.staged.consumers and self.num_active == 0
        if everyone_came and not self._why and self.staged.state not in (StagedState.WRITING, StagedState.READING):
            self.end(ALL_CAME, is_fault=True)

    def _drop(self) -> None:
        self._unpin()
        self.changed.set()
        self.area.freed()
        self.area.forget(self)

    def _unpin(self) -> None:
        if self.kept is not None:
            kept, self.kept = self.kept, None
            kept.pool.unpin(kept.extent)


class StagedPixels:
    """The source of an item that a rank materializes itself. Stands where `Pixels` do."""

    __slots__ = ("slice",)

    def __init__(self, source: StagedSlice) -> None:
        self.slice = source

    @property
    def offset(self) -> int:
        """In its region."""
        return self.slice.staged.offset

    def grid(self, facts: ModelFacts) -> Grid:
        """Patches in time, height and width.

        Raises:
            UnsupportedItem: the model does not take it.
        """
        return staged_grid(self.slice.kind, self.slice.header, facts.processor)
