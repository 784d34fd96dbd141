"""Verification: hits that are encoded again, and wrong entries that are found and removed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmcache.keys import checksum, store_key
from mmcache.server.verify import Sampler
from mmcache.tiers.lmdb import LmdbTier
from tests.mmcache.support import SidecarProcess, eventually, image
from tests.mmcache.tier_contract import LONG_S
from tests.mmcache.verifications import counts, encode, is_at_rest, verifying

MAP_BYTES = 64 << 20


def test_of_each_row_of_hits_one_is_chosen() -> None:
    sampler, draw = Sampler(7, random.Random(3)), random.Random(5)
    chosen, num_seen = [], 0
    while num_seen < 7000:
        num_hits = draw.randrange(30)
        chosen += [num_seen + place for place in sampler.choose(num_hits)]
        num_seen += num_hits
    rows = [place // 7 for place in chosen if place < 7000]
    assert rows == list(range(1000))
    assert {place % 7 for place in chosen} == set(range(7)), "no place is left out by hits that come in sevens"


def test_every_hit_is_chosen_of_rows_of_one() -> None:
    sampler = Sampler(1, random.Random(0))
    assert [sampler.choose(num_hits) for num_hits in (3, 0, 1, 2)] == [[0, 1, 2], [], [0], [0, 1]]


@pytest.mark.parametrize(
    "settings",
    [{}, {"deterministic": "true", "ranks": "2"}, {"dtype": "bfloat16"}],
    ids=["float32", "deterministic", "bfloat16"],
)
def test_what_is_right_matches_from_pool_and_from_store(tmp_path: Path, settings: dict[str, str]) -> None:
    sidecar = verifying(tmp_path, **settings)
    with sidecar, sidecar.connect() as client:
        assert encode(client, 1)[0] == "encoded"
        assert counts(sidecar) == {"sampled": 0, "matched": 0, "mismatched": 0, "dropped": 0}
        assert encode(client, 1)[0] == "pool"
        eventually(lambda: counts(sidecar)["matched"] == 1, "the hit is verified")
    with sidecar, sidecar.connect() as client:
        assert encode(client, 1)[0] == "store"
        eventually(lambda: counts(sidecar)["matched"] == 1, "the hit from the store is verified")
        assert encode(client, 1)[0] == "pool"
        eventually(lambda: is_at_rest(sidecar), "nothing is left")
        stats = sidecar.stats()
        assert (stats["items"]["encoded"], stats["verify"]["mismatched"], stats["pool"]["entries"]) == (0, 0, 1)
        assert stats["errors"] == {}


def test_never_is_never(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as client:
        for _ in range(3):
            encode(client, 1)
    assert counts(sidecar) == {"sampled": 0, "matched": 0, "mismatched": 0, "dropped": 0}


def tamper(path: Path, keys: Sequence[bytes], change: Callable[[np.ndarray[Any, Any]], None]) -> None:
    """Replace stored float32 embeddings by changed ones, whole and with checksums that are right."""

    async def rewrite() -> None:
        tier = await LmdbTier.open(path, MAP_BYTES)
        for entry in await tier.find(keys):
            assert entry is not None
            payload = np.empty(entry.nbytes // 4, np.float32)
            assert await tier.read(entry, payload.data.cast("B"))
            change(payload)
            await tier.remove([entry.key])
            await tier.put(replace(entry, checksum=checksum(payload.data)), payload.data.cast("B"))
        assert await tier.close(LONG_S)

    asyncio.run(rewrite())


def stored(path: Path, key: bytes) -> bool:
    async def find() -> bool:
        tier = await LmdbTier.open(path, MAP_BYTES)
        (entry,) = await tier.find([key])
        assert await tier.close(LONG_S)
        return entry is not None

    return asyncio.run(find())


@pytest.mark.parametrize(
    ("deterministic", "change"), [("false", 1e-3), ("true", 1e-7)], ids=["beyond the bound", "in the last bits"]
)
def test_a_wrong_entry_is_found_counted_and_removed(tmp_path: Path, deterministic: str, change: float) -> None:
    def disturb(payload: np.ndarray[Any, Any]) -> None:
        payload *= 1 + change

    path = tmp_path / "store.lmdb"
    sidecar = verifying(tmp_path, deterministic=deterministic)
    with sidecar, sidecar.connect() as client:
        right, other = encode(client, 1)[1], encode(client, 2)[1]
        names = [store_key(client.fingerprint, client.key(image(seed))) for seed in (1, 2)]
    tamper(path, names[:1], disturb)
    with sidecar, sidecar.connect() as client:
        (wrong,) = client.encode([image(1)])
        assert wrong.origin == "store"
        seen = wrong.numpy().copy()
        assert not np.array_equal(seen, right)
        eventually(lambda: counts(sidecar)["mismatched"] == 1, "the wrong entry is found")
        assert str(client.key(image(1))) in sidecar.log()
        np.testing.assert_array_equal(wrong.numpy(), seen, "a lease outlives its entry")
        origin, again = encode(client, 1)
        assert origin == "encoded"
        np.testing.assert_array_equal(again, right)
        np.testing.assert_array_equal(wrong.numpy(), seen)
        wrong.release()
        assert encode(client, 2)[0] == "store"
        eventually(lambda: is_at_rest(sidecar), "nothing is left")
        eventually(lambda: sidecar.stats()["pool"]["entries"] == 2, "the wrong extent's room is free again")
    assert all(stored(path, name) for name in names), "the right one is stored in its place"
    with sidecar, sidecar.connect() as client:
        for seed, expected in ((1, right), (2, other)):
            origin, embedding = encode(client, seed)
            assert origin == "store"
            np.testing.assert_array_equal(embedding, expected)


def tampered(folder: Path, change: Callable[[np.ndarray[Any, Any]], None]) -> SidecarProcess:
    """A sidecar, to be started, whose store has a changed embedding of the first picture."""
    sidecar = verifying(folder)
    with sidecar, sidecar.connect() as client:
        encode(client, 1)
        name = store_key(client.fingerprint, client.key(image(1)))
    tamper(folder / "store.lmdb", [name], change)
    return sidecar


def test_within_the_bound_is_no_mismatch(tmp_path: Path) -> None:
    """Without `deterministic` another number of threads may have made it."""

    def disturb(payload: np.ndarray[Any, Any]) -> None:
        payload *= 1 + 1e-6

    sidecar = tampered(tmp_path, disturb)
    with sidecar, sidecar.connect() as client:
        assert encode(client, 1)[0] == "store"
        eventually(lambda: counts(sidecar)["matched"] == 1, "it is verified")


def test_values_that_are_not_finite_are_a_mismatch(tmp_path: Path) -> None:
    def spoil(payload: np.ndarray[Any, Any]) -> None:
        payload[5] = np.nan

    sidecar = tampered(tmp_path, spoil)
    with sidecar, sidecar.connect() as client:
        assert np.isnan(encode(client, 1)[1]).any()
        eventually(lambda: counts(sidecar)["mismatched"] == 1, "the damage is found")
        assert encode(client, 1)[0] == "encoded"


def test_two_hundred_hits_stay_right(tmp_path: Path) -> None:
    items = [image(seed, 28, 28) for seed in range(200)]
    with verifying(tmp_path) as sidecar, sidecar.connect() as client:
        first = [lease.numpy().copy() for lease in client.encode(items)]
        for _ in range(5):
            leases = client.encode(items)
            assert [lease.origin for lease in leases] == ["pool"] * 200
            for lease, embedding in zip(leases, first, strict=True):
                np.testing.assert_array_equal(lease.numpy(), embedding)
                lease.release()
        eventually(lambda: is_at_rest(sidecar), "nothing is left")
        found = counts(sidecar)
        assert found["sampled"] == 1000
        assert found["matched"] > 0
        assert found["mismatched"] == 0
        assert sidecar.stats()["items"]["encoded"] == 200
