"""What is evicted is served no more, from any tier; leases on it stay valid."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmcache
from mmcache.aio import AsyncClient
from mmcache.framing import Kind, pack_frame
from mmcache.keys import ContentKey, namespace_id, store_key
from mmcache.protocol_upkeep import Evict
from mmcache.server.evictions import MAX_REMEMBERED, Evictions
from mmcache.tiers.base import Selection
from mmcache.tiers.tiered import TieredStore
from tests.mmcache.gated_tier import Done, GatedTier, put_behind
from tests.mmcache.homes import RawClient, home_without_ranks, until
from tests.mmcache.places import big, release
from tests.mmcache.reloads import encoded
from tests.mmcache.support import SidecarProcess, eventually, image
from tests.mmcache.test_cli import run
from tests.mmcache.tier_contract import LONG_S, make_entry
from tests.mmcache.weights import write_checkpoint

NOWHERE = {"entries": 0, "bytes": 0}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return write_checkpoint(folder / "a", 1), write_checkpoint(folder / "b", 2)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, models: tuple[Path, Path]) -> Iterator[SidecarProcess]:
    """A sidecar with a file store and a pool of 32 places for big pictures."""
    folder = tmp_path_factory.mktemp("stored")
    store = f"file://{folder}/store.lmdb"
    with SidecarProcess(folder, model=str(models[0]), store=store, pool_bytes="1MiB") as sidecar:
        yield sidecar


@pytest.fixture
def client(stored: SidecarProcess) -> Iterator[mmcache.Client]:
    """Nothing is cached."""
    with stored.connect() as client:
        written(client)
        assert client.evict(everything=True)["failed"] == {}
        yield client
        eventually(lambda: client.stats()["leases"]["active"] == 0, "no lease is left")
        assert client.leases(check=True)["problems"] == []


def written(client: mmcache.Client) -> None:
    eventually(lambda: client.stats()["store"]["queued_bytes"] == 0, "everything is stored")


def filled(client: mmcache.Client, *seeds: int) -> list[ContentKey]:
    """Pictures that pool and store have; their keys."""
    pictures = [image(seed) for seed in seeds]
    encoded(client, "encoded", pictures)
    written(client)
    return [client.key(picture) for picture in pictures]


def counts(found: dict[str, Any]) -> dict[str, int]:
    assert found["failed"] == {}
    assert list(found["tiers"]) == ["pool", "lmdb"]
    return {name: tier["entries"] for name, tier in found["tiers"].items()}


def test_keys_are_encoded_anew_and_leases_read_on(client: mmcache.Client) -> None:
    keys = filled(client, 1, 2, 3)
    pictures = [image(seed) for seed in (1, 2, 3)]
    leases = client.encode(pictures)
    before = [lease.numpy().copy() for lease in leases]
    nbytes = sum(lease.nbytes for lease in leases[:2])
    found = client.evict(keys[:2])
    assert found == {
        "dry_run": False,
        "tiers": {name: {"entries": 2, "bytes": nbytes} for name in ("pool", "lmdb")},
        "failed": {},
    }
    assert client.lookup(keys) == [None, None, "pool"]
    for lease, rows in zip(leases, before, strict=True):
        np.testing.assert_array_equal(lease.numpy(), rows)
    again = client.encode(pictures)
    assert [lease.origin for lease in again] == ["encoded", "encoded", "pool"]
    written(client)
    assert counts(client.evict([*keys[:2], ContentKey(bytes(16))])) == {"pool": 2, "lmdb": 2}
    release([*leases, *again])
    assert counts(client.evict(keys[:2])) == {"pool": 0, "lmdb": 0}


def test_more_keys_than_one_frame_has(client: mmcache.Client) -> None:
    keys = filled(client, 1, 2)
    others = [ContentKey(number.to_bytes(16, "big")) for number in range(1500)]
    assert counts(client.evict([keys[0], *others, keys[1]])) == {"pool": 2, "lmdb": 2}


def test_a_namespace_and_nothing_of_another(stored: SidecarProcess, client: mmcache.Client) -> None:
    filled(client, 1, 2)
    with stored.connect(namespace="demo") as theirs:
        keys = filled(theirs, 1, 2, 3)
        assert counts(client.evict(keys)) == {"pool": 0, "lmdb": 0}, "keys are of one's own namespace"
        assert counts(client.evict(namespace="demo", dry_run=True)) == {"pool": 3, "lmdb": 3}
        assert theirs.lookup(keys) == ["pool"] * 3
        assert counts(client.evict(namespace="demo")) == {"pool": 3, "lmdb": 3}
        assert theirs.lookup(keys) == [None] * 3
    encoded(client, "pool", [image(1), image(2)])
    assert counts(client.evict(namespace="")) == {"pool": 2, "lmdb": 2}


def test_what_waits_for_room_is_not_promoted_once_it_is_evicted(client: mmcache.Client) -> None:
    """Found in the store and read from it, its embedding was on its way while it was evicted."""
    (picture,) = big(1)
    release(client.encode([picture]))
    written(client)
    held = client.encode(big(*range(2, 34)))
    key = client.key(picture)
    assert client.lookup([key]) == ["store"]
    call = client.submit([picture])
    eventually(lambda: client.stats()["pool"]["room_waits"] > 0, "it waits for room")
    assert counts(client.evict([key])) == {"pool": 0, "lmdb": 1}
    release(held[:1])
    (lease,) = call.result()
    assert lease.origin == "encoded"
    release([lease, *held[1:]])


def test_a_model_before_is_stale(client: mmcache.Client, stored: SidecarProcess, models: tuple[Path, Path]) -> None:
    """Its embeddings are never served, stay in the store, and are purged by `mmcache evict --stale`."""
    first = client.fingerprint
    keys = filled(client, 1, 2, 3)
    pictures = [image(seed) for seed in (1, 2, 3)]
    of_first = encoded(client, "pool", pictures)
    second = client.reload(models[1])
    of_second = encoded(client, "encoded", pictures)
    assert not any(np.array_equal(one, two) for one, two in zip(of_first, of_second, strict=True))
    written(client)
    assert counts(client.evict(stale=True, dry_run=True)) == {"pool": 0, "lmdb": 3}
    assert counts(client.evict(keys[:1], fingerprint=first, dry_run=True)) == {"pool": 0, "lmdb": 1}
    assert counts(client.evict(stale=True, namespace="demo")) == {"pool": 0, "lmdb": 0}
    done = run("evict", "--stale", "--socket", stored.socket)
    assert done.returncode == 0, done.stderr
    assert "evicted from lmdb   3 embeddings" in done.stdout
    assert counts(client.evict(fingerprint=second, dry_run=True)) == {"pool": 3, "lmdb": 3}
    encoded(client, "pool", pictures)
    assert client.reload(models[0]) == first
    encoded(client, "encoded", pictures)
    assert counts(client.evict(fingerprint=second)) == {"pool": 0, "lmdb": 3}


def test_what_excludes_each_other_is_refused(client: mmcache.Client) -> None:
    keys = [ContentKey(bytes(16))]
    wrong: list[dict[str, Any]] = [
        {}, {"keys": keys, "stale": True}, {"keys": keys, "namespace": ""}, {"everything": True, "stale": True},
        {"everything": True, "keys": keys}, {"stale": True, "fingerprint": client.fingerprint},
    ]  # fmt: skip
    for arguments in wrong:
        with pytest.raises(ValueError, match=r"evict|own namespace"):
            client.evict(**arguments)


@pytest.mark.parametrize(
    ("message", "body"),
    [
        ({}, b""),
        ({"everything": True}, bytes(16)),
        ({"everything": True, "namespace": ""}, b""),
        ({"stale": True}, bytes(16)),
        ({"stale": True, "fingerprint": bytes(16)}, b""),
        ({"namespace": "a"}, bytes(16)),
        ({}, bytes(17)),
        ({}, bytes(16 * 1025)),
    ],
)
def test_a_frame_that_excludes_itself_ends_its_connection(tmp_path: Path, message: dict[str, Any], body: bytes) -> None:
    async def test() -> None:
        home = home_without_ranks(tmp_path)
        raw = await RawClient.open(home)
        await raw.send(pack_frame(Kind.EVICT, Evict(ask_id=1, **message), body))
        with pytest.raises(mmcache.ConnectionLost):
            await raw.receive()
        raw._channel.close()
        await until(lambda: not home.connections, "it is forgotten")

    asyncio.run(test())


def test_an_async_client_evicts(stored: SidecarProcess, client: mmcache.Client) -> None:
    keys = filled(client, 1, 2)

    async def test() -> None:
        async with AsyncClient.connect(stored.socket) as other:
            assert counts(await other.evict(keys[:1])) == {"pool": 1, "lmdb": 1}
            assert counts(await other.evict(everything=True)) == {"pool": 1, "lmdb": 1}

    asyncio.run(test())


def test_the_command(stored: SidecarProcess, client: mmcache.Client, tmp_path: Path) -> None:
    keys = filled(client, 1, 2)
    evict = ("evict", "--socket", stored.socket)
    done = run(*evict, str(keys[0]).upper(), "--dry-run", "--json")
    assert (done.returncode, json.loads(done.stdout)["tiers"]["pool"]["entries"]) == (0, 1)
    done = run(*evict, str(keys[0]))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0].startswith("evicted from pool   1 embedding, ")
    done = run(*evict, str(keys[0]), tmp_path / "none.png")
    assert done.returncode == 1
    assert "none.png: neither a key of 32 hex digits nor a file" in done.stderr
    assert client.lookup(keys) == [None, "pool"]
    done = run(*evict, "--all", "--dry-run")
    assert (done.returncode, "would evict from lmdb   1 embedding, " in done.stdout) == (0, True)
    done = run(*evict, "--all")
    assert (done.returncode, client.lookup(keys)) == (0, [None, None])


def test_the_command_takes_files_and_namespaces(stored: SidecarProcess, tmp_path: Path) -> None:
    from examples.pictures import picture_folder

    picture = picture_folder() / "chelsea.png"
    with stored.connect(namespace="files") as client:
        release(client.encode([picture]))
        key = client.key(picture)
        done = run("evict", picture, "--socket", stored.socket)
        assert (done.returncode, client.lookup([key])) == (0, ["pool"])
        done = run("evict", picture, "--namespace", "files", "--socket", stored.socket)
        assert (done.returncode, client.lookup([key])) == (0, [None])
        release(client.encode([picture]))
        done = run("evict", "--namespace", "files", "--socket", stored.socket)
        assert (done.returncode, client.lookup([key])) == (0, [None])


@pytest.mark.parametrize(
    "arguments",
    [(), ("--all", "--stale"), ("--all", "00" * 16), ("--stale", "00" * 16), ("--fingerprint", "12"), ("--all", "x")],
)
def test_a_command_that_says_nothing_is_refused(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = run("evict", *arguments, "--socket", tmp_path / "none.sock")
    assert done.returncode == 2
    assert "Usage: mmcache evict" in done.stderr


def test_what_waits_to_be_written_is_not(tmp_path: Path) -> None:
    """Nor is what was being written; a tier that fails says so, and the others do what they can."""

    class Purged(GatedTier):
        async def purge(self, selection: Selection, *, is_dry_run: bool = False) -> Any:
            await self._pass()
            for entry, _ in list(self.held.values()):
                if selection.has(entry):
                    del self.held[entry.key]
            return mmcache.tiers.base.Purged(0, 0)

    async def test() -> None:
        tier, other, done = Purged(), GatedTier("other"), Done()
        tier.gate.clear()
        store = TieredStore([tier, other], LONG_S, 1 << 20)
        entries = [put_behind(store, number, done.of(number))[0] for number in range(4)]
        await until(lambda: store._writing is not None, "the first is being written")
        purging = asyncio.ensure_future(store.purge(Selection(keys={entry.key for entry in entries[:3]})))
        await asyncio.sleep(0.01)
        assert sorted(done.numbers) == [1, 2]
        tier.gate.set()
        outcomes = await purging
        assert outcomes["gated"] == (0, 0)
        assert str(outcomes["other"]) == "the other tier cannot be purged"
        await store.drain(LONG_S)
        assert (set(tier.held), set(other.held)) == ({entries[3].key}, {entries[3].key})
        assert sorted(done.numbers) == [0, 1, 2, 3]
        assert await store.close(LONG_S)

    asyncio.run(test())


def test_what_was_looked_up_before_an_eviction_ended_is_evicted(tmp_path: Path) -> None:
    async def test() -> None:
        home = home_without_ranks(tmp_path)
        evictions = Evictions(home)
        (mine, _), (other, _) = make_entry(1), make_entry(2)
        selection = Selection(keys={mine.key})
        assert not evictions.has(mine, 0)
        task = asyncio.ensure_future(evictions.evict(selection, is_dry_run=False))
        await asyncio.sleep(0)
        assert evictions.has(mine, 0), "while it is under way"
        assert not evictions.has(other, 0)
        await task
        assert evictions.has(mine, 0)
        assert not evictions.has(mine, evictions.num_ended)
        assert not evictions.has(other, 0)
        for _ in range(MAX_REMEMBERED):
            await evictions.evict(Selection(namespace=namespace_id("none")), is_dry_run=False)
        assert evictions.has(other, 0), "nobody knows any more"
        assert not evictions.has(other, 1)

    asyncio.run(test())


def test_a_selection_holds_together() -> None:
    entry, _ = make_entry(1)
    assert Selection().has(entry)
    assert not Selection(keys=()).has(entry)
    assert Selection(keys={entry.key}, namespace=entry.namespace, fingerprint=entry.key[:16]).has(entry)
    assert not Selection(keys={entry.key}, other_than=entry.key[:16]).has(entry)
    assert store_key(mmcache.Fingerprint(entry.key[:16]), ContentKey(entry.key[16:])) == entry.key
