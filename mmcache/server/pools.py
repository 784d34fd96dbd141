"""What is cached, in all pools: the index over them, and what becomes of it when a pool or the model goes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

from ipc.pool import Extent, ExtentState, Pool
from mmcache.foreign import ForeignModel
from mmcache.keys import Fingerprint
from mmcache.records import GRANT_EXTENT
from mmcache.server.flight import Flight
from mmcache.server.pool_memory import PoolMemory
from mmcache.server.rank import Rank

DISCARDS_A_TURN = 256
"""Extents of a replaced model that one turn of the loop gives up."""


class Pools:
    """The pools of all ranks under one index.

    Attributes:
        index: the extent of each content key that is cached, of the model that is served.
        memories: all that are in use: those of the ranks, those left by dead ones, and those that are still read.
        foreign: the model of what is cached that is not of the one that is served, by key.
        num_past_evictions: of memories that are gone.
        num_past_batches: of ranks that are dead.
        num_to_discard: extents of a replaced model that still take room.
    """

    def __init__(self, *on_lost: Callable[[Collection[Extent]], None]) -> None:
        """`on_lost` are told of extents that will not be handed out any more, and that somebody keeps."""
        self._on_lost = on_lost
        self._index: dict[bytes, Extent] = {}
        self.foreign: dict[bytes, ForeignModel] = {}
        self._ranks: dict[int, Rank] = {}
        self.memories: dict[int, PoolMemory] = {}
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

    def made_under(self, key: bytes, served: Fingerprint) -> Fingerprint:
        """The fingerprint that what is cached under a key is of: that of the served model, unless it is foreign."""
        foreign = self.foreign.get(key)
        return served if foreign is None else foreign.fingerprint

    def pool_of(self, extent: Extent) -> Pool | None:
        """The pool that an extent is in, unless no rank goes on with it."""
        memory = self.memories.get(extent.pool_id)
        return None if memory is None or memory.pool.is_retired else memory.pool

    def rank_of(self, extent: Extent) -> Rank | None:
        """The living rank whose pool an extent is in."""
        return self._ranks.get(extent.pool_id)

    def cache(self, flight: Flight, rank: Rank, extent: Extent, seconds: float, shape: tuple[int, ...]) -> bool:
        """Complete and guarded bytes go into the index. False, and they are dropped, if a client's put was faster.

        `shape`: tokens, then the grid.
        """
        key = flight.key
        if key in self._index:
            rank.pool.abandon(extent)
            return False
        tokens, t, h, w = shape
        record = GRANT_EXTENT.pack(extent.pool_id, tokens, extent.offset, extent.nbytes, t, h, w)
        rank.pool.publish(extent, key, seconds, record, flight.namespace)
        self._index[key] = extent
        if flight.foreign is not None:
            self.foreign[key] = flight.foreign
        return True

    def withdraw(self, *extents: Extent) -> None:
        """Serve embeddings no more. Leases on them stay valid."""
        cached = [extent for extent in extents if extent.key is not None and self._index.get(extent.key) is extent]
        for extent in cached:
            assert extent.key is not None, "it is in the index"
            self._forget(extent.key)
            self.memories[extent.pool_id].pool.discard(extent)
        self._lost(cached)

    def withdraw_all(self) -> None:
        """What was of the model that was served is not found any more. Leases stay valid; foreign entries stay."""
        old = self._index
        self._index = {key: old.pop(key) for key in self.foreign}
        self.num_to_discard += len(old)
        self._discard(list(old.values()))

    @property
    def pools(self) -> list[Pool]:
        """Every pool that is cached in or still read."""
        return [memory.pool for memory in self.memories.values()]

    def add(self, rank: Rank, memory: PoolMemory) -> bool:
        """A rank takes work: its pool may be cached in. Whether the pool is new."""
        self._ranks[memory.pool_id] = rank
        is_new = memory.pool_id not in self.memories
        self.memories[memory.pool_id] = memory
        return is_new

    def lose(self, rank: Rank) -> None:
        """A rank is dead."""
        del self._ranks[rank.pool.pool_id]
        self.num_past_batches += rank.batcher.num_batches

    def retire(self, memory: PoolMemory) -> None:
        """No rank goes on with it: what is cached there is found no more, and stays as long as it is leased."""
        memory.pool.retire()
        self._lost(memory.pool.extents())
        if memory.pool_id not in self.memories:  # its rank never took work
            memory.close()

    def evicted(self, extent: Extent) -> None:
        """An extent made room for another, or its pool was retired."""
        if extent.key is not None and self._index.get(extent.key) is extent:
            self._forget(extent.key)

    def sweep(self) -> None:
        """Give back the memory of dead ranks that nobody reads any more."""
        for memory in [memory for memory in self.memories.values() if memory.pool.is_retired and memory.pool.is_idle]:
            del self.memories[memory.pool_id]
            self.num_past_evictions += memory.pool.num_evictions
            memory.close()

    def close(self) -> None:
        """Give back all memory: no rank and no client is left that is told of it."""
        for memory in self.memories.values():
            memory.close()

    def _forget(self, key: bytes) -> None:
        del self._index[key]
        self.foreign.pop(key, None)

    def _discard(self, extents: list[Extent]) -> None:
        """Free the extents, a bounded number at once: the pool may evict the others meanwhile."""
        batch = extents[-DISCARDS_A_TURN:]
        for extent in batch:
            if extent.state is ExtentState.CACHED:
                self.memories[extent.pool_id].pool.discard(extent)
        self._lost(batch)
        self.num_to_discard -= len(batch)
        del extents[-DISCARDS_A_TURN:]
        if extents:
            asyncio.get_running_loop().call_soon(self._discard, extents)

    def _lost(self, extents: Collection[Extent]) -> None:
        if kept := {extent for extent in extents if extent.state is ExtentState.DEAD}:
            for tell in self._on_lost:
                tell(kept)
