"""What is cached, in all pools: the index over them, and what becomes of it when a pool or the model goes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

from ipc.pool import Extent, ExtentState
from mmcache.records import GRANT_EXTENT
from mmcache.server.rank import Rank

DISCARDS_A_TURN = 256
"""Extents of a replaced model that one turn of the loop gives up."""


class Pools:
    """The pools of all ranks under one index.

    Attributes:
        index: the extent of each content key that is cached, of the model that is served.
        retired: dead ranks whose pools are still read.
        num_past_evictions, num_past_batches: of ranks that are dead.
        num_to_discard: extents of a replaced model that still take room.
    """

    def __init__(self, *on_lost: Callable[[Collection[Extent]], None]) -> None:
        """`on_lost` are told of extents that will not be handed out any more, and that somebody keeps."""
        self._on_lost = on_lost
        self._index: dict[bytes, Extent] = {}
        self._ranks: dict[int, Rank] = {}
        self.retired: list[Rank] = []
        self.num_past_evictions = 0
        self.num_past_batches = 0
        self.num_to_discard = 0

    @property
    def index(self) -> Mapping[bytes, Extent]:
        """What is cached, by content key."""
        return self._index

    def get(self, key: bytes) -> Extent | None:
        """The extent in which a content key is cached."""
        return self._index.get(key)

    def rank_of(self, extent: Extent) -> Rank | None:
        """The living rank whose pool an extent is in."""
        return self._ranks.get(extent.pool_id)

    def cache(self, key: bytes, rank: Rank, extent: Extent, seconds: float, shape: tuple[int, ...]) -> bool:
        """Complete and guarded bytes go into the index. False, and they are dropped, if a client's put was faster.

        `shape`: tokens, then the grid.
        """
        if key in self._index:
            rank.pool.abandon(extent)
            return False
        tokens, t, h, w = shape
        record = GRANT_EXTENT.pack(extent.pool_id, tokens, extent.offset, extent.nbytes, t, h, w)
        rank.pool.publish(extent, key, seconds, record)
        self._index[key] = extent
        return True

    def withdraw(self, extent: Extent) -> None:
        """Serve an embedding no more. Leases on it stay valid."""
        if (rank := self.rank_of(extent)) is not None and extent.key and self._index.get(extent.key) is extent:
            del self._index[extent.key]
            rank.pool.discard(extent)
            self._lost([extent])

    def withdraw_all(self) -> None:
        """Nothing that is cached is of the model that is served from now on. Leases stay valid."""
        old, self._index = self._index, {}
        self.num_to_discard += len(old)
        self._discard(list(old.values()))

    def add(self, rank: Rank) -> None:
        """A rank takes work: its pool may be cached in."""
        self._ranks[rank.pool_id] = rank

    def lose(self, rank: Rank) -> None:
        """A rank is dead: what it cached is found no more, and stays as long as it is leased."""
        del self._ranks[rank.pool_id]
        rank.pool.retire()
        self._lost(rank.pool.extents())
        self.retired.append(rank)
        self.num_past_evictions += rank.pool.num_evictions
        self.num_past_batches += rank.batcher.num_batches

    def evicted(self, extent: Extent) -> None:
        """An extent made room for another, or its pool was retired."""
        if extent.key is not None and self._index.get(extent.key) is extent:
            del self._index[extent.key]

    def sweep(self) -> None:
        """Give back the memory of dead ranks that nobody reads any more."""
        for rank in [rank for rank in self.retired if rank.pool.is_idle]:
            self.retired.remove(rank)
            rank.close_pool()

    def _discard(self, extents: list[Extent]) -> None:
        """Free the extents, a bounded number at once: the pool may evict the others meanwhile."""
        batch = extents[-DISCARDS_A_TURN:]
        for extent in batch:
            rank = self._ranks.get(extent.pool_id)
            if rank is not None and extent.state is ExtentState.CACHED:
                rank.pool.discard(extent)
        self._lost(batch)
        self.num_to_discard -= len(batch)
        del extents[-DISCARDS_A_TURN:]
        if extents:
            asyncio.get_running_loop().call_soon(self._discard, extents)

    def _lost(self, extents: Collection[Extent]) -> None:
        if kept := {extent for extent in extents if extent.state is ExtentState.DEAD}:
            for tell in self._on_lost:
                tell(kept)
