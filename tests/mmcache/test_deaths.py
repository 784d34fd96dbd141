"""kill -9 of every kind of process, during traffic, and what is left afterwards."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmcache
from tests.mmcache.support import SidecarProcess, clean_environ, eventually, image, is_alive

READER = """
import sys, time
import mmcache
from tests.mmcache.support import image
client = mmcache.connect(sys.argv[1])
leases = client.encode([image(seed) for seed in range(8)])
held = leases[0].hold()
print("holding", flush=True)
{then}
"""


def reader(sidecar: SidecarProcess, then: str) -> subprocess.Popen[str]:
    """A client process that holds eight leases, and what it does then."""
    process = subprocess.Popen(
        [sys.executable, "-c", READER.format(then=then), str(sidecar.socket)],
        stdout=subprocess.PIPE, text=True, env=clean_environ(),
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "holding\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def restarted(stats: dict[str, Any]) -> bool:
    return bool(stats["ranks"]["restarts"] == 1 and stats["ranks"]["ready"] == stats["ranks"]["configured"])


def active(sidecar: SidecarProcess) -> int:
    return int(sidecar.stats()["leases"]["active"])


def test_killed_client_loses_its_leases(sidecar: SidecarProcess) -> None:
    process = reader(sidecar, "time.sleep(600)")
    assert active(sidecar) == 8
    end(process)
    eventually(lambda: active(sidecar) == 0, "the dead client's leases end")
    with sidecar.connect() as client:
        for lease in client.encode([image(seed) for seed in range(8)]):
            assert lease.origin == "pool"
            lease.release()


def test_client_killed_during_traffic(sidecar: SidecarProcess) -> None:
    """Killed while its bytes are asked for, decoded, encoded and granted: everything comes back."""
    code = (
        "import sys, itertools, mmcache\n"
        "from tests.mmcache.support import image\n"
        "client = mmcache.connect(sys.argv[1])\n"
        "keep = []\n"
        "for n in itertools.count(int(sys.argv[2])):\n"
        "    keep += client.encode([image(8 * n + i, 280, 280) for i in range(8)], errors='return')[:2]\n"
        "    print(n, flush=True)\n"
    )
    for turn in range(5):
        with subprocess.Popen(
            [sys.executable, "-c", code, str(sidecar.socket), str(1000 * turn)],
            stdout=subprocess.PIPE, text=True, env=clean_environ(),
        ) as process:  # fmt: skip
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.02 * turn)
            process.kill()

    def is_idle() -> bool:
        stats = sidecar.stats()
        busy = (stats["leases"]["active"], stats["pool"]["bytes_leased"], stats["ingest"]["bytes_used"])
        return busy == (0, 0, 0) and stats["encode"]["queued"] == 0 and stats["leases"]["connections"] == 1

    eventually(is_idle, "leases, extents and ingest slices come back")
    with sidecar.connect() as client:
        client.encode([image(7)])[0].release()
    assert sidecar.stats()["errors"] == {}


def test_forked_child_keeps_the_socket_of_a_dead_client(sidecar: SidecarProcess) -> None:
    """The child holds socket and control memory open; the leases end with the process that opened them."""
    process = reader(sidecar, "child = os.fork() or time.sleep(600); print(child, flush=True); time.sleep(600)".replace(
        "os.", "__import__('os')."
    ))  # fmt: skip
    assert process.stdout is not None
    child = int(process.stdout.readline())
    assert is_alive(child)
    process.kill()
    eventually(lambda: active(sidecar) == 0, "the leases of the dead parent end")
    assert is_alive(child), "the child still holds the socket open"
    os.kill(child, signal.SIGKILL)
    process.communicate()


def test_a_forked_child_cannot_end_its_parents_leases(sidecar: SidecarProcess) -> None:
    then = (
        "import os, gc\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    for lease in leases: lease.release()\n"
        "    del held; client.close(); gc.collect()\n"
        "    try: client.encode([])\n"
        "    except mmcache.ClientClosed: sys.exit(0)\n"
        "    sys.exit(9)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)\n"
        "time.sleep(600)"
    )
    process = reader(sidecar, then)
    assert process.stdout is not None
    assert process.stdout.readline() == "0\n", "the child is told to connect anew"
    assert active(sidecar) == 8, "the parent's leases are untouched"
    end(process)


def test_closed_socket_of_a_live_client_quarantines(sidecar: SidecarProcess) -> None:
    process = reader(sidecar, "client._pump.channel.close(); print('closed', flush=True); time.sleep(600)")
    assert process.stdout is not None
    process.stdout.readline()
    eventually(lambda: sidecar.stats()["leases"]["quarantined"] == 8, "reads may still be queued")
    assert active(sidecar) == 8
    end(process)
    eventually(lambda: active(sidecar) == 0, "death ends the quarantine")


def test_killed_rank_is_replaced(tmp_path: Path) -> None:
    with SidecarProcess(tmp_path, ranks="2") as sidecar, sidecar.connect() as client:
        pictures = [image(seed) for seed in range(12)]
        before = client.encode(pictures)
        expected = [lease.numpy().copy() for lease in before]
        victim = sidecar.stats()["ranks"]["pids"][0]
        os.kill(victim, signal.SIGKILL)
        eventually(lambda: restarted(sidecar.stats()), "the rank is replaced")
        for lease, array in zip(before, expected, strict=True):
            np.testing.assert_array_equal(lease.numpy(), array, "leases on the old memory stay readable")
        after = client.encode(pictures)
        assert {lease.origin for lease in after} == {"encoded", "pool"}, "the other rank kept what it had"
        for lease, array in zip(after, expected, strict=True):
            np.testing.assert_allclose(lease.numpy(), array, rtol=1e-4, atol=1e-5)
        for lease in (*before, *after):
            lease.release()
        assert client.stats()["leases"]["active"] == 0


def test_rank_killed_while_encoding(tmp_path: Path) -> None:
    """Items in flight are retried; nothing is lost and nothing is wrong."""
    with SidecarProcess(tmp_path, ranks="2") as sidecar, sidecar.connect() as client:
        results: list[Any] = []
        pictures = [image(seed, 420, 560) for seed in range(24)]
        work = threading.Thread(target=lambda: results.extend(client.encode(pictures, errors="return")))
        work.start()
        eventually(lambda: sidecar.stats()["encode"]["queued"] > 0, "ranks are at work")
        os.kill(sidecar.stats()["ranks"]["pids"][0], signal.SIGKILL)
        work.join()
        failed = [result for result in results if isinstance(result, Exception)]
        assert not failed
        with client.encode([pictures[5]])[0] as again:
            np.testing.assert_allclose(again.numpy(), results[5].numpy(), rtol=1e-4, atol=1e-5)
        for lease in results:
            lease.release()


def test_killed_decoder_is_replaced(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as client:
        os.kill(sidecar.stats()["decoders"]["pids"][0], signal.SIGKILL)
        with client.encode([image(1)])[0] as lease:
            assert lease.origin == "encoded"
        assert sidecar.stats()["decoders"]["restarts"] == 1


def test_processes_come_back_when_descriptors_do(sidecar: SidecarProcess) -> None:
    """Rank and decoder die while the sidecar has no descriptor left to start others."""
    with sidecar.connect() as client:
        stats = sidecar.stats()
        before = resource.prlimit(sidecar.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(sidecar.pid, resource.RLIMIT_NOFILE, (3, before[1]))
        for pid in (*stats["ranks"]["pids"], *stats["decoders"]["pids"]):
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: client.stats()["ranks"]["restarts"] >= 2, "it tries and fails")
        assert client.stats()["ranks"]["ready"] == 0
        resource.prlimit(sidecar.pid, resource.RLIMIT_NOFILE, before)
        eventually(lambda: bool(client.stats()["ready"]), "a rank is expected or back", 60)
        with client.encode([image(1)])[0] as lease:
            assert lease.origin == "encoded"


def test_killed_sidecar_leaves_nothing_and_its_clients_read_on(tmp_path: Path) -> None:
    def shared_names() -> set[str]:
        return set(os.listdir("/dev/shm"))

    names = shared_names()
    sidecar = SidecarProcess(tmp_path, ranks="2").start()
    client = sidecar.connect()
    leases = client.encode([image(seed) for seed in range(4)])
    expected = [lease.numpy().copy() for lease in leases]
    stats = sidecar.stats()
    children = [*stats["ranks"]["pids"], *stats["decoders"]["pids"]]
    sidecar.kill()
    eventually(lambda: not any(is_alive(pid) for pid in children), "ranks and decoders die with the sidecar")
    for lease, array in zip(leases, expected, strict=True):
        np.testing.assert_array_equal(lease.numpy(), array)
    with pytest.raises(mmcache.ConnectionLost, match="connect again"):
        client.encode([image(1)])
    with pytest.raises(mmcache.ConnectionLost, match="connect again"):
        client.stats()
    assert shared_names() == names
    with SidecarProcess(tmp_path, ranks="2") as second, second.connect() as again:
        (lease,) = again.encode([image(0)])
        np.testing.assert_allclose(lease.numpy(), expected[0], rtol=1e-4, atol=1e-5)
        lease.release()
    for lease in leases:
        lease.release()
    client.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "state"]


def test_sidecar_killed_during_traffic(tmp_path: Path) -> None:
    sidecar = SidecarProcess(tmp_path, store=f"file://{tmp_path}/store.lmdb").start()
    errors: list[Exception] = []

    def traffic(client: mmcache.Client, first: int) -> None:
        try:
            for seed in range(first, first + 10_000):
                client.encode([image(seed)])[0].release()
        except mmcache.MMCacheError as error:
            errors.append(error)

    clients = [sidecar.connect() for _ in range(3)]
    threads = [threading.Thread(target=traffic, args=(client, 10_000 * i)) for i, client in enumerate(clients)]
    for thread in threads:
        thread.start()
    eventually(lambda: sidecar.stats()["items"]["encoded"] > 20, "traffic")
    sidecar.kill()
    for thread in threads:
        thread.join()
    assert [type(error) for error in errors] == [mmcache.ConnectionLost] * 3
    with SidecarProcess(tmp_path, store=f"file://{tmp_path}/store.lmdb") as second, second.connect() as client:
        with client.encode([image(0)])[0] as lease:
            assert lease.origin in {"encoded", "store"}
        assert second.stats()["errors"] == {}
