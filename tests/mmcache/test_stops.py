"""Processes that are killed or stopped between two steps, fork or become another: afterwards the books agree."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmcache
from tests.mmcache.support import SidecarProcess, clean_environ, eventually, image

HOLDER = """
import os, sys, time
import mmcache
from tests.mmcache.support import image
client = mmcache.connect(sys.argv[1], name="holder")
leases = client.encode([image(seed) for seed in range(8)], consumers=2)
client.stage(image(100))
{then}
"""


def holder(sidecar: SidecarProcess, then: str) -> subprocess.Popen[str]:
    """A client that holds eight leases, offers sixteen shares, has staged a picture, and says so after `then`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER.format(then=then), str(sidecar.socket)],
        stdout=subprocess.PIPE, text=True, env=clean_environ(PYTHONPATH="."),
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "so far\n"
    return process


def is_whole(sidecar: SidecarProcess) -> bool:
    """The books agree, nobody holds anything, and there is no name that a dead process could have left."""
    with sidecar.connect() as client:
        found = client.leases(check=True)
        stats = client.stats()
    assert found["problems"] == []
    assert not [name for name in os.listdir("/dev/shm") if "mmcache" in name]
    held = stats["leases"]["active"] + stats["pool"]["bytes_leased"] + stats["staging"]["bytes_used"]
    return bool(held == 0 and stats["leases"]["connections"] == 1)


@pytest.mark.parametrize(
    "then",
    [
        "print('so far', flush=True); time.sleep(600)",
        "leases[0].release(); leases[3].release(); print('so far', flush=True); time.sleep(600)",
        "client._core.control.acknowledge(1, 10**6); print('so far', flush=True); time.sleep(600)",
        "held = leases[0].hold(); client.close(); print('so far', flush=True); time.sleep(600)",
        "client.submit([image(seed, 840, 1120) for seed in range(30)]); print('so far', flush=True); time.sleep(600)",
        "client._pump.channel.close(); print('so far', flush=True); time.sleep(600)",
    ],
    ids=["holding", "between-acknowledgements", "false-words", "closed-but-holding", "in-a-call", "socket-closed"],
)
def test_a_client_that_is_killed_leaves_whole_books(sidecar: SidecarProcess, then: str) -> None:
    process = holder(sidecar, then)
    process.kill()
    process.communicate()
    eventually(lambda: is_whole(sidecar), "all of it has ended")


def test_a_client_that_forks_and_becomes_another_program(sidecar: SidecarProcess) -> None:
    """The child holds copies of every descriptor and mapping; neither it nor the new program ends or keeps a lease."""
    process = holder(
        sidecar,
        "if os.fork() == 0: os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('so far', flush=True); time.sleep(600)",
    )
    with sidecar.connect() as client:
        assert client.stats()["leases"]["active"] == 8
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait()
    try:
        eventually(lambda: is_whole(sidecar), "the leases were the parent's")
    finally:
        for child in children:
            os.kill(int(child), signal.SIGKILL)
        process.communicate()


def test_a_client_that_becomes_another_program_keeps_its_leases_in_quarantine(sidecar: SidecarProcess) -> None:
    """Its process lives, so that its reads could; its socket is closed with the old program."""
    process = holder(
        sidecar,
        "print('so far', flush=True)\nos.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(600)'])",
    )
    with sidecar.connect() as client:
        eventually(lambda: client.stats()["leases"]["quarantined"] == 8, "its socket is closed")
        (found,) = [one for one in client.leases()["holders"] if one["name"] == "holder"]
        assert found["why"]
        assert client.leases(check=True)["problems"] == []
    process.kill()
    process.communicate()
    eventually(lambda: is_whole(sidecar), "its process is dead")


def test_a_client_that_is_stopped_holds_and_goes_on(sidecar: SidecarProcess) -> None:
    process = holder(sidecar, "print('so far', flush=True); sys.stdin.readline()")
    os.kill(process.pid, signal.SIGSTOP)
    with sidecar.connect() as client:
        for seed in range(20, 30):
            client.encode([image(seed)])[0].release()
        assert client.stats()["leases"]["active"] == 8
        assert client.leases(check=True)["problems"] == []
    os.kill(process.pid, signal.SIGCONT)
    process.communicate(timeout=20)
    eventually(lambda: is_whole(sidecar), "it has ended")


def test_a_rank_that_is_stopped_delays_and_loses_nothing(tmp_path: Path) -> None:
    with SidecarProcess(tmp_path, ranks="2") as sidecar, sidecar.connect() as client:
        hit = image(1)
        client.encode([hit])[0].release()
        rank = sidecar.stats()["ranks"]["pids"][0]
        os.kill(rank, signal.SIGSTOP)
        handle = client.submit([image(seed, 112, 112) for seed in range(10, 26)])
        with client.encode([hit])[0] as lease:
            assert lease.origin == "pool", "hits do not need it"
        time.sleep(0.3)
        os.kill(rank, signal.SIGCONT)
        for lease in handle.result():
            lease.release()
        assert client.stats()["ranks"]["restarts"] == 0
        client.close()
        eventually(lambda: is_whole(sidecar), "nothing is left")


def test_a_rank_that_is_killed_while_it_writes_leaves_the_others_cached(tmp_path: Path) -> None:
    with SidecarProcess(tmp_path, ranks="2") as sidecar, sidecar.connect() as client:
        pictures = [image(seed, 112, 112) for seed in range(24)]
        keys = [client.key(picture) for picture in pictures]
        for lease in client.encode(pictures):
            lease.release()
        handle = client.submit([image(seed, 840, 1120) for seed in range(100, 106)])
        eventually(lambda: handle.poll() or sidecar.stats()["encode"]["queued"] > 1, "both write")
        os.kill(sidecar.stats()["ranks"]["pids"][0], signal.SIGKILL)
        for lease in handle.result():
            lease.release()
        eventually(lambda: sidecar.stats()["ranks"]["ready"] == 2, "it is replaced")
        found = client.lookup(keys)
        assert 0 < found.count("pool") < len(keys), "what the other rank cached is there"
        for lease in client.encode(pictures):
            lease.release()
        client.close()
        eventually(lambda: is_whole(sidecar), "nothing is left")


def test_a_sidecar_that_is_stopped_and_goes_on(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as client:
        leases = client.encode([image(1), image(2)])
        expected = [lease.numpy().copy() for lease in leases]
        sidecar.send_signal(signal.SIGSTOP)
        for lease, right in zip(leases, expected, strict=True):
            np.testing.assert_array_equal(lease.numpy(), right)
            lease.release()
        handle = client.submit([image(3)])
        assert not handle.poll()
        sidecar.send_signal(signal.SIGCONT)
        handle.result()[0].release()
    eventually(lambda: is_whole(sidecar), "nothing is left")


def latency_of(call: Callable[[], object]) -> tuple[list[float], threading.Thread]:
    """Run a call that is to fail in a thread; when it failed, on the monotonic clock."""
    ended: list[float] = []

    def run() -> None:
        with pytest.raises(mmcache.ConnectionLost):
            call()
        ended.append(time.monotonic())

    thread = threading.Thread(target=run)
    thread.start()
    return ended, thread


def test_every_waiting_call_hears_of_the_sidecars_death(sidecar: SidecarProcess) -> None:
    """Each kind of call waits, in threads that share a client, and beside it. How soon is in docs/benchmarks.md."""
    client, other = sidecar.connect(), sidecar.connect()
    (lease,) = client.encode([image(1)])
    expected = lease.numpy().copy()
    sidecar.send_signal(signal.SIGSTOP)
    calls: list[Callable[[], Any]] = [
        lambda: client.encode([image(5)]), client.stats, lambda: client.lookup([client.key(image(1))]),
        lambda: client.submit([image(6)]).result(), lambda: other.stage(image(7)), other.leases,
    ]  # fmt: skip
    waiting = [latency_of(call) for call in calls]
    time.sleep(0.5)
    started = time.monotonic()
    sidecar.kill()
    for _, thread in waiting:
        thread.join(20)
    assert all(ended for ended, _ in waiting)
    print(f"heard after {[f'{(ended[0] - started) * 1e3:.1f} ms' for ended, _ in waiting]}")
    np.testing.assert_array_equal(lease.numpy(), expected)
    lease.release()
    client.close()
    other.close()
