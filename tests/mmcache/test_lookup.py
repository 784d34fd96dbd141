"""client.lookup: where embeddings are, without granting or changing anything."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mmcache.errors import ConnectionLost
from mmcache.framing import Kind, pack_frame
from mmcache.keys import ContentKey, Fingerprint
from mmcache.records import LOOKUP_HEAD, MAX_ITEMS
from mmcache.server.lookups import NOWHERE, POOL, ask_store
from mmcache.tiers.tiered import TieredStore
from tests.mmcache.gated_tier import GatedTier
from tests.mmcache.support import SidecarProcess, eventually, image

UNKNOWN, KNOWN = ContentKey(bytes(16)), ContentKey(bytes(range(16)))


def test_where_each_key_is(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store.lmdb"
    pictures = [image(seed) for seed in range(3)]
    with SidecarProcess(tmp_path, store=store) as sidecar, sidecar.connect() as client:
        keys = [client.key(picture) for picture in pictures]
        assert client.lookup([*keys, UNKNOWN]) == [None] * 4
        for lease in client.encode(pictures[:2]):
            lease.release()
        assert client.lookup([*keys, UNKNOWN, keys[1]]) == ["pool", "pool", None, None, "pool"]
        eventually(lambda: client.stats()["store"]["written"] == 2, "both are stored")
        before = client.stats()
    with SidecarProcess(tmp_path, store=store) as sidecar, sidecar.connect() as client:
        assert client.lookup(keys) == ["store", "store", None]
        client.encode(pictures[:1])[0].release()
        assert client.lookup([UNKNOWN, *keys]) == [None, "pool", "store", None]
        assert client.lookup([]) == []
        after = client.stats()
    assert before["items"]["hit_pool"] == 0, "a look-up is no hit"
    assert (after["items"]["total"], after["leases"]["active"], after["requests"]) == (1, 0, 1)


def test_more_keys_than_a_frame_has(shared_sidecar: SidecarProcess) -> None:
    with shared_sidecar.connect() as client:
        client.encode([image(1)])[0].release()
        key = client.key(image(1))
        found = client.lookup([UNKNOWN] * MAX_ITEMS + [key])
        assert found == [None] * MAX_ITEMS + ["pool"]
        assert client.lookup([key] * (2 * MAX_ITEMS)) == ["pool"] * (2 * MAX_ITEMS)


def test_a_namespace_does_not_see_another_ones(shared_sidecar: SidecarProcess) -> None:
    with shared_sidecar.connect(namespace="a") as client, shared_sidecar.connect(namespace="b") as other:
        client.encode([image(1)])[0].release()
        assert client.lookup([client.key(image(1))]) == ["pool"]
        assert other.lookup([other.key(image(1))]) == [None]


@pytest.mark.parametrize("fails", [False, True])
def test_a_store_that_hangs_or_fails_is_a_none_within_its_time(fails: bool) -> None:
    """The look-up's own half over a tier that never answers, or only says that it cannot."""

    async def ask() -> list[bytes]:
        tier = GatedTier()
        tier.fails = fails
        if not fails:
            tier.gate.clear()
        store = TieredStore([tier], 0.05, 0)
        served: Any = SimpleNamespace(fingerprint=Fingerprint(bytes(16)), dtype="float32", dim=64)
        home: Any = SimpleNamespace(facts=served, store=store, verifier=SimpleNamespace(is_condemned=bool))
        home.pools = SimpleNamespace(get={KNOWN: object()}.get)
        replies: list[bytes] = []
        codes = bytearray([POOL, NOWHERE])
        await ask_store(home, [KNOWN, UNKNOWN], codes, lambda: replies.append(bytes(codes)))
        assert tier.asked == [[bytes(32)]], "the store is asked for what the pools do not have"
        assert store.counters()["failed" if fails else "late"] == 1
        return replies

    assert asyncio.run(ask()) == [bytes([POOL, NOWHERE])]


@pytest.mark.parametrize("body", [b"", LOOKUP_HEAD.pack(7), LOOKUP_HEAD.pack(7) + bytes(15), bytes(4 + 16 * 1025)])
def test_a_broken_frame_costs_the_connection_alone(shared_sidecar: SidecarProcess, body: bytes) -> None:
    with shared_sidecar.connect() as observer, shared_sidecar.connect() as client:
        client._pump.turn(lambda core: core.outbox.append(pack_frame(Kind.LOOKUP, None, body)))
        with pytest.raises(ConnectionLost):
            client.stats()
        assert observer.lookup([UNKNOWN]) == [None]
