"""Which counters of `mmcache stats` are which metrics. Names and units follow Prometheus' conventions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, `mmcache_` and `_total` of a counter left out.

    Attributes:
        path: to its number in the statistics, by dots; or with a label, to what holds a number for each of its values.
        label: name of the label whose values are the keys of what is at `path`.
        keys: the keys that are taken, with the label's value of each; all of them, if there are none.
        but: keys that are not taken.
        field: of what is at a key, the number, if it is not a number itself.
    """

    name: str
    kind: Kind
    help: str
    path: str
    label: str = ""
    keys: tuple[tuple[str, str], ...] = ()
    but: frozenset[str] = frozenset()
    field: str = ""


def _same(*keys: str) -> tuple[tuple[str, str], ...]:
    return tuple((key, key) for key in keys)


METRICS = (
    Metric("ready", "gauge", "1 while requests can be served, 0 while no rank is alive or expected.", "ready"),
    Metric("model_reloads", "counter", "Models that were loaded in the place of another.", "reloads"),
    Metric("requests", "counter", "Encode requests.", "requests"),
    Metric("items", "counter", "Items of encode requests.", "items.total"),
    Metric(
        "item_results", "counter",
        "What became of items: hit_* by tier, joined (waited for another's), encoded, put, fetched, failed. Of items "
        "that several requests waited for, hit_store and encoded count one.",
        "items", "result", but=frozenset({"total"}),
    ),
    Metric("item_errors", "counter", "Items that failed, by the error that their client got.", "errors", "error"),
    Metric("connections", "gauge", "Clients that are connected.", "leases.connections"),
    Metric("leases_active", "gauge", "Leases that have not ended.", "leases.active"),
    Metric("leases_quarantined", "gauge", "Leases of those that are quarantined.", "leases.quarantined"),
    Metric("leases_over_limit", "counter", "Leases that were held for longer than lease_limit_s.", "leases.over_limit"),
    Metric("clients_killed", "counter", "Processes that were killed for that.", "leases.killed"),
    Metric("offers_ended", "counter", "Offers that nobody claimed within lease_limit_s.", "leases.ended"),
    Metric("offers_open", "gauge", "Offers with shares that nobody has claimed yet.", "leases.offers"),
    Metric("pool_size_bytes", "gauge", "Memory of all pools.", "pool.bytes_total"),
    Metric("pool_used_bytes", "gauge", "Memory of the pools that holds embeddings.", "pool.bytes_used"),
    Metric("pool_leased_bytes", "gauge", "Memory of the pools that is leased.", "pool.bytes_leased"),
    Metric("pool_entries", "gauge", "Embeddings in the pools.", "pool.entries"),
    Metric("pool_evictions", "counter", "Embeddings that made room in a pool.", "pool.evictions"),
    Metric("pool_room_waits", "counter", "Times that an allocation found no room and looked again.", "pool.room_waits"),
    Metric("pool_recalls", "counter", "Grants taken back from a call that waited for room.", "pool.recalls"),
    Metric("ranks_configured", "gauge", "Ranks that there should be.", "ranks.configured"),
    Metric("ranks_ready", "gauge", "Ranks that take work.", "ranks.ready"),
    Metric("rank_restarts", "counter", "Ranks that were started anew.", "ranks.restarts"),
    Metric("rank_deaths", "counter", "Ranks that were lost, by why.", "ranks.deaths", "reason"),
    Metric("rank_out_of_memory", "counter", "Batches for which a rank's memory was too small.", "ranks.out_of_memory"),
    Metric("decoders_configured", "gauge", "Decoders that there should be.", "decoders.configured"),
    Metric("decoders_ready", "gauge", "Decoders that take work.", "decoders.ready"),
    Metric("decoder_restarts", "counter", "Decoders that were started anew.", "decoders.restarts"),
    Metric(
        "decoder_items", "gauge", "Items that wait for a decoder, or are in the hands of one.", "decoders", "state",
        keys=_same("queued", "in_hand"),
    ),
    Metric("decoded_items", "counter", "Items that were decoded.", "decoders.decoded"),
    Metric("decoder_suspects", "counter", "Items that killed a decoder and were tried alone.", "decoders.suspects"),
    Metric("ingest_size_bytes", "gauge", "Memory for decoded pictures.", "ingest.bytes_total"),
    Metric("ingest_used_bytes", "gauge", "Memory for decoded pictures that is in use.", "ingest.bytes_used"),
    Metric("ingest_gave_way", "counter", "Decoded items that made room and are decoded twice.", "ingest.gave_way"),
    Metric("staging_regions", "gauge", "Clients that have a staging region.", "staging.regions"),
    Metric("staging_size_bytes", "gauge", "Memory of all staging regions.", "staging.bytes_total"),
    Metric("staging_used_bytes", "gauge", "Memory of the staging regions that is in use.", "staging.bytes_used"),
    Metric("staged_slices", "counter", "Slices that were staged.", "staging.staged"),
    Metric(
        "staged_slices_ended", "counter", "Staged slices by how they ended: read, or not needed.", "staging", "result",
        keys=(("reads", "read"), *_same("unread", "cancelled", "failed", "died")),
    ),
    Metric("encode_queued_items", "gauge", "Items that wait for a rank.", "encode.queued"),
    Metric("flights", "gauge", "Items that are looked up, decoded or encoded.", "queue.flights"),
    Metric("flights_limit", "gauge", "Most of them, beyond which requests are refused.", "queue.max_items"),
    Metric("queue_predicted_seconds", "gauge", "Work in the queue for ranks, as predicted.", "queue.seconds"),
    Metric(
        "queue_items", "gauge", "Items in the queue for ranks.", "queue", "priority", keys=_same("interactive", "bulk")
    ),
    Metric("encode_batches", "counter", "Batches that were begun.", "batches.begun"),
    Metric("encode_items", "counter", "Items of batches that were begun.", "batches.items"),
    Metric("encode_patches", "counter", "Patches of batches that were begun.", "batches.patches"),
    Metric("encode_retries", "counter", "Tries of items after one that failed.", "batches.retried"),
    Metric("encode_batch_fill_ratio", "gauge", "Patches of the last batches, of the most that fit.", "batches.fill"),
    Metric("store_lookups", "counter", "Keys that the store was asked for.", "store", "result",
           keys=(("hits", "hit"), ("misses", "miss"))),
    Metric("store_reads", "counter", "Embeddings read from the store.", "store", "result", keys=_same("read", "lost")),
    Metric("store_faults", "counter", "Look-ups and reads of a tier that were late or failed.", "store", "reason",
           keys=_same("late", "failed")),
    Metric("store_writes", "counter", "Embeddings given to the store, by what became of them.", "store", "result",
           keys=(("written", "written"), ("write_failed", "failed"), ("dropped", "dropped"))),
    Metric("store_queued_writes", "gauge", "Embeddings that wait to be written.", "store.queued"),
    Metric("store_queued_bytes", "gauge", "Bytes that wait to be written.", "store.queued_bytes"),
    Metric("tier_entries", "gauge", "Embeddings in a tier of the store.", "store.tiers", "tier", field="entries"),
    Metric("tier_used_bytes", "gauge", "Bytes in a tier of the store.", "store.tiers", "tier", field="bytes_used"),
    Metric("verifications", "counter", "Hits that were encoded again, by what came out.", "verify", "result"),
)  # fmt: skip
