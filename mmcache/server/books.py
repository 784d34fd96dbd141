"""Whether the coordinator's books agree with each other: index, pools, leases, offers, ingest and staging."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ipc.pool import ExtentState

if TYPE_CHECKING:
    from mmcache.server.coordinator import Coordinator


def problems(home: Coordinator) -> list[str]:
    """What is wrong, in words; nothing in a sidecar that is well. Walks over everything; changes nothing."""
    return [f"{name}: {fault}" for name, check in _checks(home) if (fault := _fault(check)) is not None]


def _fault(check: Callable[[], None]) -> str | None:
    try:
        check()
    except AssertionError as error:
        return str(error)[:500] or "an assertion failed"
    return None


def _checks(home: Coordinator) -> Iterator[tuple[str, Callable[[], None]]]:
    for pool in home.pools.pools:
        yield f"pool {pool.pool_id}", pool.check
    for connection in home.connections:
        if connection.holder is not None:
            yield f"holder {connection.holder.name} (pid {connection.holder.pid})", connection.holder.check
    yield "index", lambda: _check_index(home)
    yield "leases", lambda: _check_shares(home)
    yield "ingest region", home.ingest.check
    yield "staging", home.staging.check


def _check_index(home: Coordinator) -> None:
    """Every entry is a cached extent of a living pool, filed under its key; no cached extent has no entry."""
    for key, extent in home.pools.index.items():
        assert extent.key == key, f"{extent!r} is filed under {key.hex()}"
        assert extent.state is ExtentState.CACHED, f"{extent!r} is in the index"
        memory = home.pools.memories.get(extent.pool_id)
        assert memory is not None, f"{extent!r} is in the index, and its pool is gone"
        assert memory.pool is extent.pool, f"{extent!r} is in the index, and another pool has its id"
        assert not memory.pool.is_retired, f"{extent!r} is in the index, and its pool is retired"
    num_cached = sum(extent.state is ExtentState.CACHED for pool in home.pools.pools for extent in pool.extents())
    num_known = len(home.pools.index) + home.pools.num_to_discard
    assert len(home.pools.index) <= num_cached <= num_known, f"{num_cached} extents are cached, {num_known} are known"


def _check_shares(home: Coordinator) -> None:
    """Every extent is kept by just the shares and offers that holders have on it."""
    kept: Counter[int] = Counter()
    for connection in home.connections:
        if (holder := connection.holder) is not None:
            kept.update(id(share.extent) for share in holder.shares())
            kept.update(id(offer.extent) for offer in holder.offers.open())
    for pool in home.pools.pools:
        for extent in pool.extents():
            num_kept = kept.pop(id(extent), 0)
            assert num_kept == extent.num_shares, f"{extent!r} is kept by {num_kept} shares and offers"
    assert not kept, f"{len(kept)} extents are leased that no pool has"
