"""Counters, and the one place where they become the JSON of `mmcache stats`."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

from ipc.leases import Holder
from ipc.shares import HolderState, Share
from mmcache._version import __version__
from mmcache.histograms import FAST_S, LONG_S, SLOW_S, Histogram
from mmcache.server.costs import error_counters
from mmcache.server.keepings import Keeping, extents_held, keepings

if TYPE_CHECKING:
    from mmcache.server.coordinator import Coordinator

OUTCOMES = ("hit", "miss", "failed", "cancelled")
"""Of a request: all of it was in the pools; something was looked for or encoded; an item failed; it was given up."""
_GRANTED_AT = attrgetter("granted_at")


@dataclass(slots=True)
class Stats:
    """What the coordinator counts itself.

    `items`: positions asked for. `hit_pool`: granted at once. `joined`: waited for a flight that was under way.
    `hit_store`, `encoded`: flights that ended so: one a key, however many positions waited for it. `put`: embeddings
    that clients brought. `foreign_misses`: positions of other models that no tier had. `errors`: positions that failed,
    by kind.
    `room_waits`: times an allocation found no room and looked again a millisecond later. `recalls`: grants that were
    taken back from a call that waited for room, because an earlier call did too. `gave_way`: decoded items that waited
    for room and left their ingest memory to an earlier call's; they are decoded twice.
    `request_seconds`: by outcome, from a request's arrival until all of it was settled for the first time.
    `lookup_seconds`: of the look-up of a request's keys in the pools. `lease_seconds`: how long leases were held.
    `decode_seconds`: from the bytes to the pixels of an item, waiting for a decoder included.
    """

    requests: int = 0
    items: int = 0
    hit_pool: int = 0
    hit_store: int = 0
    joined: int = 0
    encoded: int = 0
    put: int = 0
    foreign_misses: int = 0
    encode_seconds: float = 0.0
    room_waits: int = 0
    recalls: int = 0
    gave_way: int = 0
    fetched: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    started_s: float = field(default_factory=time.monotonic)
    request_seconds: dict[str, Histogram] = field(
        default_factory=lambda: {name: Histogram(FAST_S) for name in OUTCOMES}
    )
    lookup_seconds: Histogram = field(default_factory=lambda: Histogram(FAST_S))
    lease_seconds: Histogram = field(default_factory=lambda: Histogram(LONG_S))
    decode_seconds: Histogram = field(default_factory=lambda: Histogram(SLOW_S))

    def leases_ended(self, shares: Sequence[Share]) -> None:
        """Leases ended; those that were granted together are mostly next to each other."""
        now = time.monotonic()
        for granted_at, together in groupby(shares, _GRANTED_AT):
            self.lease_seconds.observe(now - granted_at, sum(1 for _ in together))


def snapshot(coordinator: Coordinator) -> dict[str, object]:
    """Everything as nested plain data, numbers as numbers."""
    stats, facts, settings = coordinator.stats, coordinator.facts, coordinator.settings
    holders = [connection.holder for connection in coordinator.connections if connection.holder is not None]
    quarantined = [holder for holder in holders if holder.state is HolderState.QUARANTINED]
    ranks = coordinator.ranks
    pools = coordinator.pools.pools
    return {
        "version": __version__,
        "pid": os.getpid(),
        "ready": not ranks.outage,
        "uptime_seconds": round(time.monotonic() - stats.started_s, 3),
        "model": facts.model,
        "fingerprint": str(facts.fingerprint),
        "reloads": coordinator.reloads.num_done,
        "http": coordinator.front.address if coordinator.front is not None else "",
        "device": settings.device,
        "dtype": facts.dtype,
        "dim": facts.dim,
        "requests": stats.requests,
        "items": {
            "total": stats.items,
            "hit_pool": stats.hit_pool,
            "hit_store": stats.hit_store,
            "joined": stats.joined,
            "encoded": stats.encoded,
            "put": stats.put,
            "foreign_misses": stats.foreign_misses,
            "fetched": stats.fetched,
            "failed": stats.errors.total(),
        },
        "errors": dict(sorted(stats.errors.items())),
        "leases": {
            "active": sum(holder.num_active for holder in holders),
            "quarantined": sum(len(coordinator.lease_limit.quarantined(holder)) for holder in holders),
            "over_limit": coordinator.lease_limit.num_over,
            "killed": coordinator.lease_limit.num_killed,
            "ended": coordinator.lease_limit.num_ended,
            "offers": len(coordinator.offers),
            "connections": len(holders) - len(quarantined),
            "control_words": settings.control_words,
            "strays": sum(holder.num_strays for holder in holders),
        },
        "pool": {
            "bytes_total": sum(pool.bytes_total for pool in pools if not pool.is_retired),
            "bytes_used": sum(pool.bytes_used for pool in pools if not pool.is_retired),
            "bytes_leased": sum(pool.bytes_leased for pool in pools),
            "entries": sum(pool.num_extents for pool in pools if not pool.is_retired),
            "evictions": coordinator.pools.num_past_evictions + sum(pool.num_evictions for pool in pools),
            "room_waits": stats.room_waits,
            "recalls": stats.recalls,
        },
        "ranks": ranks.counters() | {"acceleration": [rank.acceleration for rank in ranks.ready]},
        "decoders": coordinator.decoders.counters(),
        "ingest": {
            "bytes_total": coordinator.ingest.region.nbytes,
            "bytes_used": coordinator.ingest.bytes_used,
            "gave_way": stats.gave_way,
        },
        "staging": coordinator.staging.counters(),
        "encode": {
            "seconds": round(stats.encode_seconds, 6),
            "batches": coordinator.pools.num_past_batches + sum(rank.batcher.num_batches for rank in ranks.ready),
            "queued": len(coordinator.scheduler) + sum(len(rank.batcher) for rank in ranks.ready),
        },
        "queue": {
            "flights": len(coordinator.flights),
            "max_items": settings.max_queued_items,
            **coordinator.scheduler.counters(),
        },
        "batches": coordinator.scheduler.batch_counters(),
        "loop_lag": coordinator.lag.counters(),
        "cost": error_counters([rank.cost for rank in ranks.ready])
        | {"ranks": [rank.cost.counters() for rank in ranks.ready]},
        "store": coordinator.store.counters(),
        "verify": dict(coordinator.verifier.counters),
    }


def biggest_holders(coordinator: Coordinator, asker: Holder) -> str:
    """Who keeps most of the pools, for people: the client that asks, others, and those that are only quarantined."""
    sizes = [
        (sum(extent.nbytes for extent in extents_held(coordinator, connection)), connection.holder, connection)
        for connection in coordinator.connections
    ]
    named = [
        _described(holder, size, asker, keepings(coordinator, connection))
        for size, holder, connection in nlargest(3, sizes, key=lambda sized: sized[0])
        if size and holder is not None
    ]
    return "; ".join(named) or "nobody: what is in it is being written, or stored"


def _described(holder: Holder, size: int, asker: Holder, kept: Sequence[Keeping]) -> str:
    who = "this client itself" if holder is asker else holder.name
    what = f"{holder.num_active} leases"
    if holder.state is HolderState.QUARANTINED:
        what += " in quarantine (its connection is closed, its process lives)"
    counts = Counter(keeping.what for keeping in kept)
    if counts["offered"]:
        what += f", {counts['offered']} with unclaimed shares"
    if counts["staged"]:
        what += f", {counts['staged']} kept for consumers of staged pixels"
    return f"{who} (pid {holder.pid}): {what}, {size} bytes"
