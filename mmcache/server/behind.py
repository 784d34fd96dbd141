"""What was published goes to the store, off the path of any request."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ipc.pool import Extent, ExtentState
from mmcache.foreign import VALUE_BYTES
from mmcache.keys import ContentKey, Fingerprint, store_key
from mmcache.server.batcher import RankLostError
from mmcache.server.ingest import IngestBusyError, IngestSlice
from mmcache.server.rank import Rank

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from mmcache.server.coordinator import Coordinator


class Model(NamedTuple):
    """Of an embedding that is written: whose it is, and what its rows are."""

    fingerprint: Fingerprint
    dtype: str
    dim: int


class WriteBehind:
    """Hands embeddings to the store: host memory in place, device memory by way of spare room in the ingest region.

    `spawn` runs a task that ends with the sidecar.
    """

    def __init__(self, home: Coordinator, spawn: Callable[[Coroutine[object, object, None]], None]) -> None:
        self._home = home
        self._spawn = spawn

    def write(self, rank: Rank, extent: Extent, shape: tuple[int, ...]) -> None:
        """Store what was published just now, later. `shape`: tokens, then the grid."""
        assert rank.memory is not None, "it was published in its pool"
        if not self._home.store.has_tiers:
            return
        model = self._model(extent, shape[0])
        rank.pool.pin(extent)
        payload = rank.memory.payload(extent)
        if payload is not None:
            self._put(model, extent, shape, payload, lambda: rank.pool.unpin(extent))
            return
        try:
            part = self._home.ingest.reserve_spare(extent.nbytes)
        except IngestBusyError:
            self._home.store.count_dropped()
            rank.pool.unpin(extent)
        else:
            self._spawn(self._copy(rank, model, extent, shape, part))

    async def _copy(self, rank: Rank, model: Model, extent: Extent, shape: tuple[int, ...], part: IngestSlice) -> None:
        ingest = self._home.ingest
        is_copied = False
        try:
            is_copied = await rank.copy_out(extent, part.offset)
        except RankLostError:
            self._home.store.count_dropped()
        finally:
            is_wanted = is_copied and extent.state is ExtentState.CACHED  # else it turned out to be wrong, or is old
            rank.pool.unpin(extent)
            if not is_wanted:
                ingest.free(part)
        if is_wanted:
            self._put(model, extent, shape, ingest.memory(part), lambda: ingest.free(part))

    def _model(self, extent: Extent, num_tokens: int) -> Model:
        """What it was published as."""
        assert extent.key is not None, "it was published"
        facts, foreign = self._home.facts, self._home.pools.foreign.get(extent.key)
        if foreign is None:
            return Model(facts.fingerprint, facts.dtype, facts.dim)
        return Model(*foreign, extent.nbytes // (num_tokens * VALUE_BYTES[foreign.dtype]))

    def _put(
        self, model: Model, extent: Extent, shape: tuple[int, ...], payload: memoryview, done: Callable[[], None]
    ) -> None:
        assert extent.key is not None, "it was published"
        self._home.store.put_behind(
            key=store_key(model.fingerprint, ContentKey(extent.key)), namespace=extent.group,
            shape=(shape[0], model.dim), dtype=model.dtype, grid_thw=(shape[1], shape[2], shape[3]),
            encode_seconds=extent.cost_seconds, payload=payload, done=done,
        )  # fmt: skip
