"""Verification: hits that are encoded again, wrong entries that are found and removed, and clients that do not help."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmcache
from mmcache.keys import ContentKey, checksum, store_key
from mmcache.media import describe
from mmcache.server.verify import PATIENCE_S, Sampler
from mmcache.supplying import Supplying
from mmcache.tiers.base import Entry
from mmcache.tiers.lmdb import LmdbTier
from mmcache.tiers.tiered import TieredStore
from tests.mmcache.gated_tier import Done, GatedTier, put_behind
from tests.mmcache.support import SidecarProcess, clean_environ, eventually, image
from tests.mmcache.tier_contract import LONG_S

MAP_BYTES = 64 << 20


def verifying(folder: Path, **settings: str) -> SidecarProcess:
    chosen = {"verify_sample": "1", "store": f"file://{folder}/store.lmdb", "store_bytes": "64MiB"} | settings
    return SidecarProcess(folder, **chosen)


def counts(sidecar: SidecarProcess) -> dict[str, int]:
    return dict(sidecar.stats()["verify"])


def is_at_rest(sidecar: SidecarProcess) -> bool:
    """Everything sampled has its outcome, and nothing is held for it."""
    stats = sidecar.stats()
    outcomes = sum(stats["verify"][name] for name in ("matched", "mismatched", "dropped"))
    return bool(stats["verify"]["sampled"] == outcomes and stats["ingest"]["bytes_used"] == 0)


def encode(client: mmcache.Client, seed: int) -> tuple[str, np.ndarray[Any, Any]]:
    with client.encode([image(seed)])[0] as lease:
        return lease.origin, lease.numpy().copy()


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


def misbehave(client: mmcache.Client, verify: Callable[[Supplying], None]) -> None:
    """Have a client do something else than send the bytes of hits."""
    core = client._core
    supply = core.supply
    core.supply = lambda core, asked: verify(asked) if asked.verify else supply(core, asked)


def send(client: mmcache.Client, asked: Supplying) -> None:
    """What a client does with bytes that are asked for."""
    asked.prepare()
    client._core.supplied(asked)


def test_a_client_that_sends_too_late_or_never(tmp_path: Path) -> None:
    asked: list[Supplying] = []
    with verifying(tmp_path) as sidecar, sidecar.connect() as client:
        misbehave(client, asked.append)
        encode(client, 1)
        assert encode(client, 1)[0] == "pool"
        assert asked
        assert counts(sidecar)["dropped"] == 0
        eventually(lambda: counts(sidecar)["dropped"] == 1, "it is not waited for", PATIENCE_S + 20)
        send(client, asked[0])
        assert encode(client, 1)[0] == "pool", "bytes that nobody waits for any more do no harm"
        assert counts(sidecar)["matched"] == 0


def test_a_liar_is_dropped_and_removes_nothing(tmp_path: Path) -> None:
    with verifying(tmp_path) as sidecar, sidecar.connect() as client:

        def lie(asked: Supplying) -> None:
            for position in asked.verify:
                asked.pending.part._media[position] = describe(image(99), 0, 1 << 20)
            send(client, asked)

        encode(client, 1)
        misbehave(client, lie)
        assert encode(client, 1)[0] == "pool"
        eventually(lambda: counts(sidecar)["dropped"] == 1, "the lie is dropped")
        assert encode(client, 1)[0] == "pool"
        stats = sidecar.stats()
        assert (stats["verify"]["mismatched"], stats["errors"]) == (0, {})


DYING = """
import os, sys, time
import mmcache
from tests.mmcache.support import image
client = mmcache.connect(sys.argv[1])
client.encode([image(1)])[0].release()
def verify(core, asked):
    assert asked.verify
    if sys.argv[2] == "supplied":
        asked.prepare()
        core.supplied(asked)
        client._pump.channel.send_all(client._core.outbox, time.monotonic() + 10)
    print("asked", flush=True)
    time.sleep(600)
client._core.supply = verify
client.encode([image(1)])
"""


@pytest.mark.parametrize("sent", ["nothing", "supplied"])
def test_the_death_of_a_client_in_between_leaves_nothing(tmp_path: Path, sent: str) -> None:
    with verifying(tmp_path) as sidecar:
        process = subprocess.Popen(
            [sys.executable, "-c", DYING, str(sidecar.socket), sent],
            stdout=subprocess.PIPE, text=True, env=clean_environ(),
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "asked\n"
        process.kill()
        process.communicate()
        outcome = "matched" if sent == "supplied" else "dropped"
        eventually(lambda: counts(sidecar)[outcome] == 1, "the verification ends")
        eventually(lambda: is_at_rest(sidecar) and sidecar.stats()["leases"]["active"] == 0, "nothing is left")
        with sidecar.connect() as client:
            assert encode(client, 1)[0] == "pool"


def is_back(sidecar: SidecarProcess, num_restarts: int) -> bool:
    ranks = sidecar.stats()["ranks"]
    return bool(ranks["restarts"] == num_restarts and ranks["ready"] == 1)


def test_a_rank_killed_in_between_is_no_mismatch(tmp_path: Path) -> None:
    with verifying(tmp_path) as sidecar, sidecar.connect() as client:
        for round_ in range(4):
            encode(client, 1)
            encode(client, 1)
            os.kill(sidecar.stats()["ranks"]["pids"][0], signal.SIGKILL)
            eventually(partial(is_back, sidecar, round_ + 1), "the rank is replaced")
        eventually(lambda: is_at_rest(sidecar), "nothing is left")
        assert counts(sidecar)["mismatched"] == 0


def test_a_shutdown_does_not_wait_for_it(tmp_path: Path) -> None:
    with verifying(tmp_path, drain_timeout_s="60") as sidecar, sidecar.connect() as client:
        asked: list[Sequence[int]] = []
        misbehave(client, lambda supplying: asked.append(supplying.verify))
        encode(client, 1)
        encode(client, 1)
        assert asked == [[0]]
        assert sidecar.stop() == 0
        assert "Traceback" not in sidecar.log()


def test_what_waits_to_be_written_is_removed_too() -> None:
    async def test() -> None:
        tier, done = GatedTier(), Done()
        store = TieredStore([tier], LONG_S, 1 << 20)
        entry, _ = put_behind(store, 1, done.of(1))
        put_behind(store, 2, done.of(2))
        assert await store.remove(entry.key)
        await store.drain(LONG_S)
        assert (sorted(done.numbers), len(tier.held), entry.key in tier.held) == ([1, 2], 1, False)
        assert await store.close(LONG_S)

    asyncio.run(test())


class PuttingTier(GatedTier):
    """Tells when it is given an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = asyncio.Event()

    async def put(self, entry: Entry, payload: memoryview) -> None:
        self.begun.set()
        await super().put(entry, payload)


def test_what_is_being_written_is_removed_afterwards() -> None:
    async def test() -> None:
        tier, done = PuttingTier(), Done()
        store = TieredStore([tier], LONG_S, 1 << 20)
        tier.gate.clear()
        entry, _ = put_behind(store, 1, done.of(1))
        await tier.begun.wait()  # its checksum is taken, and it is in the tier's hands
        removal = asyncio.ensure_future(store.remove(entry.key))
        await asyncio.sleep(0)
        tier.gate.set()
        assert await removal
        await store.drain(LONG_S)
        assert (done.numbers, tier.held) == ([1], {})
        put_behind(store, 1, done.of(3))
        await store.drain(LONG_S)
        assert list(tier.held) == [entry.key], "what comes afterwards is written as ever"
        assert await store.close(LONG_S)

    asyncio.run(test())


def test_a_removal_that_fails_says_so() -> None:
    async def test() -> None:
        tier = GatedTier()
        store = TieredStore([tier], LONG_S, 1 << 20)
        tier.fails = True
        assert not await store.remove(bytes(ContentKey(bytes(16))) * 2)
        assert store.counters()["failed"] == 1
        assert await store.close(LONG_S)

    asyncio.run(test())
