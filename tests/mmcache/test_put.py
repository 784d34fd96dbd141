"""client.put: embeddings made elsewhere, under the guards of encoded ones."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mmcache
from ipc.memory_shm import SharedRegion, sealed_copy
from mmcache.errors import ConnectionLost
from mmcache.framing import Kind, pack_frame
from mmcache.keys import ContentKey
from mmcache.protocol import Put
from tests.mmcache.support import SidecarProcess, eventually, image
from tests.mmcache.weights import write_checkpoint

GRID = (1, 4, 6)
NUM_TOKENS = 6


def key(number: int) -> ContentKey:
    return ContentKey(number.to_bytes(16, "little"))


def embedding(client: mmcache.Client, seed: int, num_tokens: int = NUM_TOKENS) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal((num_tokens, client.dim), np.float32)


@pytest.fixture
def other(shared_sidecar: SidecarProcess) -> Iterator[mmcache.Client]:
    with shared_sidecar.connect() as client:
        yield client


def test_another_client_reads_the_same_bytes(client: mmcache.Client, other: mmcache.Client) -> None:
    picture = image(700)
    expected = embedding(client, 1)
    before = client.stats()["items"]
    assert client.put(client.key(picture), expected, GRID, cost_seconds=0.5)
    with other.encode([picture])[0] as lease:
        np.testing.assert_array_equal(lease.numpy(), expected)
        assert (lease.origin, lease.grid_thw, lease.num_tokens) == ("pool", GRID, NUM_TOKENS)
    after = client.stats()["items"]
    assert (after["put"], after["encoded"]) == (before["put"] + 1, before["encoded"])


def test_what_is_there_stays(client: mmcache.Client) -> None:
    picture = image(701)
    with client.encode([picture])[0] as lease:
        assert not client.put(lease.key, np.zeros_like(lease.numpy()), lease.grid_thw)
        assert lease.numpy().any()
        assert client.put(key(701), lease.numpy(), lease.grid_thw), "it is the key that counts, not the bytes"
    assert not client.put(key(701), embedding(client, 1), GRID)


@pytest.mark.parametrize(("number", "value"), [(710, np.nan), (711, np.inf), (712, -np.inf)])
def test_what_is_not_finite_is_refused_and_counted(client: mmcache.Client, number: int, value: float) -> None:
    before = client.stats()
    bad = embedding(client, 2)
    bad[-1, -1] = value
    with pytest.raises(mmcache.NonFiniteEmbedding, match="NaN or Inf"):
        client.put(key(number), bad, GRID)
    assert client.lookup([key(number)]) == [None]
    after = client.stats()
    assert after["errors"]["NonFiniteEmbedding"] == before["errors"].get("NonFiniteEmbedding", 0) + 1
    for gauge in ("entries", "bytes_used"):
        assert after["pool"][gauge] == before["pool"][gauge], "its extent is free again"
    assert after["ingest"]["bytes_used"] == 0
    assert client.put(key(number), embedding(client, 2), GRID), "the key is not spoilt"


@pytest.mark.parametrize(
    ("num_tokens", "grid", "match"),
    [
        (5, GRID, "6 tokens, got 5"),
        (NUM_TOKENS, (1, 4, 8), "8 tokens, got 6"),
        (NUM_TOKENS, (5, 4, 6), "1 to 4 frames"),
        (NUM_TOKENS, (0, 4, 6), "no item of grid"),
        (NUM_TOKENS, (1, 5, 6), "multiples of 2"),
        (NUM_TOKENS, (1, 0, 6), "no item of grid"),
        (257, (1, 2, 1028), "sides of 2 to 512"),
        (NUM_TOKENS, (1, 1 << 16, 6), "grid is 65536"),
        (NUM_TOKENS, (1, -4, 6), "grid is -4"),
    ],
)
def test_a_grid_that_does_not_fit(
    client: mmcache.Client, num_tokens: int, grid: tuple[int, int, int], match: str
) -> None:
    with pytest.raises(mmcache.WrongEmbedding, match=match):
        client.put(key(703), embedding(client, 3, num_tokens), grid)
    assert client.lookup([key(703)]) == [None]


def test_a_shape_or_dtype_that_does_not_fit(client: mmcache.Client) -> None:
    good = embedding(client, 4)
    for bad in (good[:, :-1], good[0], good.astype(np.float64), torch.from_numpy(good).bfloat16(), good[:0]):
        with pytest.raises(mmcache.WrongEmbedding, match="must be float32"):
            client.put(key(704), bad, GRID)
    assert client.put(key(704), np.asfortranarray(good), GRID)


def put_message(client: mmcache.Client, number: int, **changes: Any) -> Put:
    fields: dict[str, Any] = {
        "ask_id": 1 << 20, "timeout_ms": 10_000, "fingerprint": bytes(client.fingerprint), "key": bytes(key(number)),
        "num_tokens": NUM_TOKENS, "grid": GRID,
    }  # fmt: skip
    return Put(**(fields | changes))


@pytest.mark.parametrize("what", ["too small", "too large", "not sealed", "none"])
def test_memory_that_breaks_the_rules_costs_the_connection_alone(shared_sidecar: SidecarProcess, what: str) -> None:
    with shared_sidecar.connect() as observer, shared_sidecar.connect() as client:
        nbytes = {"too small": 1, "too large": NUM_TOKENS * client.dim * 4 + 4096}.get(
            what, NUM_TOKENS * client.dim * 4
        )
        fds = []
        if what == "not sealed":
            unsealed = SharedRegion.create("test", nbytes)
            fds = [os.dup(unsealed.fd)]
        elif what != "none":
            fds = [sealed_copy("test", [bytes(nbytes)])[0]]
        client._pump.turn(
            lambda core: core.outbox.append(pack_frame(Kind.PUT, put_message(client, 705), fds=fds, owned=True))
        )
        with pytest.raises(ConnectionLost):
            client.stats()
        assert observer.lookup([key(705)]) == [None]


def test_bfloat16_and_after_a_restart_from_the_store(tmp_path: Path) -> None:
    settings = {"store": f"file://{tmp_path}/store.lmdb", "dtype": "bfloat16", "deterministic": "false"}
    with SidecarProcess(tmp_path, **settings) as sidecar, sidecar.connect() as client:
        good = torch.linspace(-3, 3, NUM_TOKENS * client.dim).view(NUM_TOKENS, client.dim).bfloat16()
        bad = good.clone()
        bad[3, 5] = torch.nan
        with pytest.raises(mmcache.NonFiniteEmbedding):
            client.put(key(1), bad, GRID)
        picture = image(1)
        assert client.put(client.key(picture), good, GRID, cost_seconds=0.25)
        eventually(lambda: client.stats()["store"]["written"] == 1, "it is stored, and what was refused is not")
        with pytest.raises(mmcache.WrongEmbedding, match="must be bfloat16"):
            client.put(key(2), good.float(), GRID)
    with SidecarProcess(tmp_path, **settings) as sidecar, sidecar.connect() as client:
        assert client.lookup([client.key(picture), key(1)]) == ["store", None]
        with client.encode([picture])[0] as lease:
            assert torch.equal(lease.tensor, good)
            assert (lease.origin, lease.grid_thw) == ("store", GRID)


def test_a_put_while_a_flight_of_its_key_is_under_way(sidecar: SidecarProcess) -> None:
    """The rank is stopped with the flight's batch in its hands, so that both come to the same end in either order."""
    with sidecar.connect() as client, sidecar.connect() as other:
        picture = image(1, 448, 448)
        (rank,) = client.stats()["ranks"]["pids"]
        os.kill(rank, signal.SIGSTOP)
        handle = other.submit([picture])
        eventually(lambda: not handle.poll() and client.stats()["encode"]["queued"] == 1, "the flight is at the rank")
        plan = client.plan([picture])[0]
        assert isinstance(plan, mmcache.Plan)
        mine = embedding(client, 1, plan.num_tokens)
        answers: list[bool] = []
        putting = threading.Thread(target=lambda: answers.append(client.put(client.key(picture), mine, plan.grid_thw)))
        putting.start()
        eventually(lambda: other.stats()["ingest"]["bytes_used"] > 448 * 448 * 3, "the put is under way, too")
        os.kill(rank, signal.SIGCONT)
        putting.join()
        (lease,) = handle.result()
        assert not other.put(lease.key, mine, plan.grid_thw)
        with lease, client.encode([picture])[0] as again:
            np.testing.assert_array_equal(lease.numpy(), again.numpy())
            assert np.array_equal(lease.numpy(), mine) == answers[0], "whoever was first is what everyone gets"
        stats = client.stats()
        assert stats["pool"]["entries"] == 1, "one entry a key"
        assert stats["errors"] == {}
        assert client.leases(check=True)["problems"] == []


def test_a_rank_dies_with_a_put_in_its_hands(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as client, sidecar.connect() as observer:
        (rank,) = client.stats()["ranks"]["pids"]
        os.kill(rank, signal.SIGSTOP)
        answers: list[bool] = []
        putting = threading.Thread(target=lambda: answers.append(client.put(key(1), embedding(client, 1), GRID)))
        putting.start()
        eventually(lambda: observer.stats()["ingest"]["bytes_used"] > 0, "it is on its way to the rank")
        os.kill(rank, signal.SIGKILL)
        putting.join()
        assert answers == [True], "the next rank has it"
        assert observer.lookup([key(1)]) == ["pool"]
        assert observer.leases(check=True)["problems"] == []


def test_a_full_pool_is_an_error_within_the_timeout(tmp_path: Path) -> None:
    with SidecarProcess(tmp_path, pool_bytes="1MiB") as sidecar, sidecar.connect(timeout=1) as client:
        grid = (1, 32, 32)
        with sidecar.connect() as other:
            held = other.encode([image(seed, 448, 448) for seed in range(4)])
            with pytest.raises(mmcache.PoolExhausted, match=r"held by .*pid"):
                client.put(key(1), embedding(client, 1, 256), grid)
            for lease in held:
                lease.release()
        assert client.put(key(1), embedding(client, 1, 256), grid)
        with pytest.raises(mmcache.PoolExhausted, match="never fit"):
            client.put(key(2), embedding(client, 2, 64 * 64), (1, 128, 128))
        stats = client.stats()
        assert (stats["ingest"]["bytes_used"], stats["pool"]["entries"]) == (0, 4), "one of four made room"


def test_a_client_that_leaves_waits_for_room_no_longer(tmp_path: Path) -> None:
    with SidecarProcess(tmp_path, pool_bytes="1MiB") as sidecar, sidecar.connect() as client:
        held = client.encode([image(seed, 448, 448) for seed in range(4)])
        leaver = sidecar.connect()
        errors: list[Exception] = []

        def put() -> None:
            try:
                leaver.put(key(1), embedding(client, 1, 256), (1, 32, 32))
            except mmcache.MMCacheError as error:
                errors.append(error)

        putting = threading.Thread(target=put)
        putting.start()
        eventually(lambda: client.stats()["ingest"]["bytes_used"] > 0, "it waits for room in the pool")
        leaver.close()
        putting.join()
        assert isinstance(errors[0], mmcache.ClientClosed)
        eventually(lambda: client.stats()["ingest"]["bytes_used"] == 0, "its place and its bytes are given up")
        assert client.lookup([key(1)]) == [None]
        for lease in held:
            lease.release()


def test_another_model_is_served_by_now(tmp_path: Path) -> None:
    a, b = (write_checkpoint(tmp_path / name, seed) for seed, name in enumerate("ab"))
    with SidecarProcess(tmp_path, model=str(a)) as sidecar, sidecar.connect() as client:
        old = client.fingerprint
        mine = embedding(client, 1)
        assert client.put(key(1), mine, GRID)
        assert client.reload(b) != old
        assert client.lookup([key(1)]) == [None]
        served = client._core.served
        client._core.served = served._replace(fingerprint=str(old))
        with pytest.raises(mmcache.WrongEmbedding, match=str(old)):
            client.put(key(1), mine, GRID)
        client._core.served = served
        assert client.put(key(1), mine, GRID)
