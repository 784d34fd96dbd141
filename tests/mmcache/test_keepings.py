"""Embeddings that stay for others: shares that nobody claimed yet, and what was staged for more consumers than came."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import mmcache
from ipc.pool import Pool
from mmcache.protocol import LeasesRequest
from mmcache.records import GRANT_EXTENT
from mmcache.server.leases_view import LeasesView
from tests.mmcache.homes import RawClient, home_without_ranks
from tests.mmcache.places import big, release
from tests.mmcache.support import SidecarProcess, eventually, image
from tests.mmcache.test_leases_view import command


def keep_two(client: mmcache.Client, *seeds: int, side: int = 56) -> tuple[mmcache.SliceRef, mmcache.StagedRef, int]:
    """Offer one embedding and leave another to a consumer of staged pixels; no lease is left. And their bytes."""
    offered, staged = (image(seed, side, side) for seed in seeds)
    (lease,) = client.encode([offered], consumers=2)
    ref, nbytes = lease.ref, lease.nbytes
    staged_ref = client.stage(staged, consumers=2)
    release([lease, *client.encode([staged_ref])])
    return ref, staged_ref, 2 * nbytes


def is_idle(client: mmcache.Client) -> bool:
    stats = client.stats()
    return stats["pool"]["bytes_leased"] == stats["leases"]["offers"] == client.leases()["num_kept"] == 0


def test_they_are_shown(sidecar: SidecarProcess) -> None:
    with sidecar.connect(name="keeper") as client, sidecar.connect() as other:
        ref, staged_ref, nbytes = keep_two(client, 1, 2)
        found = client.leases(check=True)
        row = next(row for row in found["holders"] if row["name"] == "keeper")
        assert (row["leases"], row["bytes"], row["kept"], row["bytes_kept"], row["bytes_held"]) == (
            0, 0, 2, nbytes, nbytes,
        )  # fmt: skip
        assert found["holders"][0] == row, "who keeps most comes first"
        assert (found["num_leases"], found["num_kept"], found["problems"]) == (0, 2, [])
        first, second = found["kept"]
        assert row["oldest_seconds"] == first["seconds"] >= second["seconds"] >= 0
        assert first == {
            "key": ref.key, "bytes": nbytes // 2, "tokens": ref.num_tokens, "pool": first["pool"],
            "seconds": first["seconds"], "state": "offered", "consumers": 2, "pid": os.getpid(), "holder": "keeper",
        }  # fmt: skip
        assert (second["key"], second["state"], second["consumers"]) == (staged_ref.key, "staged", 1)
        lines = command(sidecar).stdout.splitlines()
        assert [line.split()[5:7] for line in lines if line.startswith((ref.key[:12], staged_ref.key[:12]))] != []
        assert {line.split()[-3] for line in lines[-2:]} == {"offered", "staged"}
        assert "and 1 younger embeddings kept for others" in command(sidecar, "--limit", "1").stdout
        nobody = json.loads(command(sidecar, "--json", "--pid", "1").stdout)
        assert (nobody["holders"], nobody["kept"], nobody["num_kept"]) == ([], [], 2)
        release(other.open([ref, ref]))
        release(other.encode([staged_ref]))
        assert is_idle(client)


def test_a_full_pool_names_who_keeps_it(full: SidecarProcess) -> None:
    with full.connect(name="keeper") as client, full.connect(timeout=1.0) as other:
        refs = [keep_two(client, seed, seed + 1, side=448)[:2] for seed in (40, 42)]
        (error,) = other.encode(big(44), errors="return")
        assert isinstance(error, mmcache.PoolExhausted)
        assert "keeper" in error.reason
        assert "0 leases, 2 with unclaimed shares, 2 kept for consumers of staged pixels, 1048576 bytes" in error.reason
        client.cancel(*(ref for pair in refs for ref in pair))
        release(client.encode(big(44)))


@pytest.mark.parametrize("action", ["quarantine", "kill"])
def test_over_the_limit_they_end(tmp_path: Path, action: str) -> None:
    """No process is killed for what nobody reads."""
    settings = {"lease_limit_s": "0.5", "lease_limit_action": action}
    with SidecarProcess(tmp_path, **settings) as sidecar, sidecar.connect() as client:
        ref, staged_ref, _ = keep_two(client, 1, 2)
        eventually(lambda: client.stats()["leases"]["ended"] == 2, "both are over the limit")
        with pytest.raises(mmcache.SliceGone, match="lease_limit_s"):
            client.open(ref)
        assert is_idle(client)
        assert client.leases(check=True)["problems"] == []
        release(client.encode([staged_ref]))  # whoever knows the key is served what is cached
        stats = client.stats()["leases"]
        assert (stats["over_limit"], stats["killed"], stats["ended"]) == (0, 0, 2)
    assert sidecar.log().count("(lease_limit_s): not any more") in (1, 2)


def test_they_end_with_a_reload(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    with SidecarProcess(tmp_path, model=str(folders[0])) as sidecar, sidecar.connect() as client:
        ref, staged_ref, nbytes = keep_two(client, 1, 2)
        (lease,) = client.encode([image(1, 56, 56)], consumers=1)
        client.reload(folders[1])
        eventually(lambda: client.stats()["leases"]["offers"] == 0, "the old embeddings are given up")
        assert client.stats()["pool"]["bytes_leased"] == nbytes // 2, "a lease stays"
        for gone in (ref, lease.ref):
            with pytest.raises(mmcache.SliceGone, match="went with its rank or its model"):
                client.open(gone)
        (error,) = client.encode([staged_ref], errors="return")
        assert isinstance(error, mmcache.SliceGone)
        lease.release()
        assert is_idle(client)
        assert client.leases(check=True)["problems"] == []


def test_they_end_with_their_rank(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as client:
        ref, staged_ref, _ = keep_two(client, 1, 2)
        (pid,) = client.stats()["ranks"]["pids"]
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: client.stats()["ranks"]["ready"] == 0 or client.stats()["ranks"]["restarts"] == 1, "it died")
        with pytest.raises(mmcache.SliceGone, match="went with its rank or its model"):
            client.open(ref)
        (error,) = client.encode([staged_ref], errors="return")
        assert isinstance(error, mmcache.SliceGone)
        assert is_idle(client)
        eventually(lambda: client.stats()["ranks"]["ready"] == 1, "there is another")
        assert client.leases(check=True)["problems"] == []


def test_a_long_list_leaves_the_loop_its_turns(tmp_path: Path) -> None:
    """Ten thousand rows, of a client that holds more than that; the sums are exact."""

    async def ask() -> tuple[dict[str, Any], int]:
        home = home_without_ranks(tmp_path)
        pool = Pool(1, 1 << 20, on_evict=lambda _: None)
        extent = pool.reserve(1000)
        assert extent is not None
        pool.publish(extent, bytes(16), 1.0, GRANT_EXTENT.pack(1, 4, 0, 1000, 1, 4, 4))
        client = await RawClient.open(home)
        (connection,) = home.connections
        assert connection.holder is not None
        for _ in range(12_000):
            connection.holder.grant(extent)
        turns = [0]
        is_over = asyncio.Event()

        async def count() -> None:
            while not is_over.is_set():
                turns[0] += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        body = await LeasesView(home, LeasesRequest(ask_id=1, limit=10_000)).body()
        is_over.set()
        await counting
        for share in connection.holder.shares():
            connection.holder.acknowledge(share.slot, share.generation)
        await client.close(home)
        home.ingest.close()
        return json.loads(body), turns[0]

    found, num_turns = asyncio.run(ask())
    assert (found["num_leases"], len(found["leases"])) == (12_000, 10_000)
    (row,) = found["holders"]
    assert (row["leases"], row["bytes"], row["bytes_held"]) == (12_000, 12_000_000, 1000)
    assert num_turns >= 10
