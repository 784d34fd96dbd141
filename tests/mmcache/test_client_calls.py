"""Calls that end early: by a timeout, an interruption, a signal or a frozen sidecar. Nothing is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmcache
from mmcache.parts import Part, cut
from tests.mmcache.support import SidecarProcess, clean_environ, eventually, image


def test_grants_on_their_way_end_with_a_timeout(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as observer, sidecar.connect(timeout=0.5) as client:
        observer.encode([image(1)])[0].release()
        sidecar.send_signal(signal.SIGSTOP)
        with pytest.raises(mmcache.RequestTimeout):
            client.encode([image(1)] * 20)
        sidecar.send_signal(signal.SIGCONT)
        eventually(lambda: observer.stats()["items"]["hit_pool"] >= 20, "it answered late")
        eventually(lambda: observer.stats()["leases"]["active"] == 0, "though the client makes no further call")


def test_timeout_is_bounded_and_leaks_nothing(tmp_path: Path) -> None:
    with SidecarProcess(tmp_path, pool_bytes="1MiB") as sidecar, sidecar.connect() as client:
        big = [image(seed, 448, 448) for seed in range(4)]  # 256 tokens of 1 KiB each: four of them fill the pool
        leases = client.encode(big)
        with sidecar.connect(timeout=4) as hasty:
            (result,) = hasty.encode([image(9, 448, 448)], errors="return")
        assert isinstance(result, mmcache.PoolExhausted)
        assert f"pid {os.getpid()}" in result.reason, "the biggest holder is named"
        (result,) = client.encode([image(10, 28 * 40, 28 * 40)], errors="return")
        assert isinstance(result, mmcache.PoolExhausted)
        assert "never fit" in result.reason
        for lease in leases:
            lease.release()
        client.encode([image(9, 448, 448)])[0].release()
        assert client.stats()["leases"]["active"] == 0


def part_of(client: mmcache.Client, item: object) -> Part:
    """A request's part, for a request that the client itself would not make."""
    (part,) = cut([item], client._core.hasher.key, 1 << 20, on_error=lambda *_: None)
    return part


def test_grants_that_nobody_read_end_with_the_close(sidecar: SidecarProcess) -> None:
    """A request is given up after its grants were sent: the client has never seen those leases."""
    with sidecar.connect() as observer:
        observer.encode([image(1)])[0].release()
        client = sidecar.connect()
        core = client._core
        pending = core.encode(part_of(client, image(1)), 5.0)
        client._pump.channel.send_all(core.outbox, time.monotonic() + 5)
        eventually(lambda: observer.stats()["leases"]["active"] == 1, "it was granted")
        core.cancel(pending)
        client.close()
        eventually(lambda: observer.stats()["leases"] | {"strays": 0} == idle_leases(1), "the grant ended unread")


def test_grants_that_come_late_are_released(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as client:
        client.encode([image(1)])[0].release()
        core = client._core
        pending = core.encode(part_of(client, image(1)), 5.0)
        core.cancel(pending)
        client.stats()  # the grant arrives before this answer
        assert client.stats()["leases"]["active"] == 0


def idle_leases(connections: int) -> dict[str, int]:
    none = dict.fromkeys(("active", "ended", "quarantined", "over_limit", "killed", "offers", "strays"), 0)
    return none | {"connections": connections, "control_words": 16384}


def test_an_interrupted_call_leaks_nothing_and_costs_nothing_else(sidecar: SidecarProcess) -> None:
    """Ctrl-C while the sidecar works: what was granted goes on, what is on its way ends, and so does the call alone."""
    with sidecar.connect() as observer, sidecar.connect() as client:
        (lease,) = client.encode([image(1)])
        expected = lease.numpy().copy()

        def interrupt(number: int, frame: object) -> None:
            raise KeyboardInterrupt

        pictures = [image(seed, 840, 1120) for seed in range(100, 140)]
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        try:
            with pytest.raises(KeyboardInterrupt):
                client.encode(pictures)
        finally:
            signal.signal(signal.SIGALRM, before)
        client.encode([image(2)])[0].release()
        np.testing.assert_array_equal(lease.numpy(), expected)
        eventually(lambda: observer.stats()["leases"]["active"] == 1, "only the lease in hand goes on")
        lease.release()
        eventually(lambda: observer.stats()["leases"] == idle_leases(2), "it is acknowledged")


INTERRUPTED = """
import random, signal, sys, threading
import mmcache
from tests.mmcache.support import image

def interrupt(number, frame):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
draw = random.Random(3)
client = mmcache.connect(sys.argv[1])
expected = {seed: lease.numpy().copy() for seed in range(8) for lease in client.encode([image(seed)])}
client.close()
client = mmcache.connect(sys.argv[1])
num_lost, num_others, is_over = 0, 0, False

def others():
    global num_others
    while not is_over:
        try:
            for seed, lease in enumerate(client.encode([image(seed) for seed in range(8)])):
                assert (lease.numpy() == expected[seed]).all()
                lease.release()
        except mmcache.ConnectionLost as error:
            assert "interrupted" in str(error), error
            continue
        num_others += 1

threads = [threading.Thread(target=others) for _ in range(2)]
for thread in threads:
    thread.start()
for _ in range(300):
    signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-4, 5e-3), 0.1)  # again, if a finalizer swallows it
    try:
        while True:
            for lease in client.encode([image(draw.randrange(8))]):
                lease.release()
    except KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0)
    except mmcache.ConnectionLost as error:
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert "interrupted" in str(error), error
        num_lost += 1
        client = mmcache.connect(sys.argv[1])
is_over = True
for thread in threads:
    thread.join()
client.close()
print(num_lost, num_others)
"""


def test_many_interruptions_while_others_go_on(sidecar: SidecarProcess) -> None:
    """Most come while the call waits. The few that come in the middle of a frame end the connection, and say so."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERRUPTED, str(sidecar.socket)],
        capture_output=True, text=True, env=clean_environ(PYTHONPATH="."), timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    num_lost, num_others = map(int, done.stdout.split())
    assert num_lost < 200
    assert num_others > 20
    with sidecar.connect() as observer:
        eventually(lambda: observer.stats()["leases"] == idle_leases(1), "nothing of it is left")


def test_a_call_of_another_thread_goes_on_beside_one_that_waits(sidecar: SidecarProcess) -> None:
    """Whoever waits receives for all: a small call does not wait for the long one of another thread."""
    with sidecar.connect() as client:
        results: list[mmcache.Lease] = []
        pictures = [image(seed, 840, 1120) for seed in range(100, 108)]
        thread = threading.Thread(target=lambda: results.extend(client.encode(pictures)))
        thread.start()
        eventually(lambda: client.stats()["requests"] > 0, "the long call is under way")
        for _ in range(5):
            assert client.stats()["leases"]["active"] < 8
            assert not results, "the small calls came through meanwhile"
        thread.join()
        assert len(results) == 8
        for lease in results:
            lease.release()


def test_an_interruption_with_a_frame_in_hand_ends_the_connection(sidecar: SidecarProcess) -> None:
    """That frame is lost: it may have been a pool that later grants lie in."""
    with sidecar.connect() as client:
        channel = client._pump.channel
        next_frame = channel.next_frame

        def interrupted(*args: Any) -> None:
            while next_frame(*args) is None:
                pass
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(channel, "next_frame", interrupted)
            with pytest.raises(KeyboardInterrupt):
                client.stats()
        with pytest.raises(mmcache.ConnectionLost, match="interrupted"):
            client.stats()


def test_many_threads_share_a_client(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as client:
        expected = {}
        for seed in range(8):
            with client.encode([image(seed)])[0] as lease:
                expected[seed] = lease.numpy().copy()

        def work(seed: int) -> None:
            for turn in range(40):
                wanted = (seed + turn) % 8
                with client.encode([image(wanted)])[0] as lease:
                    np.testing.assert_array_equal(lease.numpy(), expected[wanted])

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(work, range(8)))
        assert client.stats()["leases"]["active"] == 0


def test_a_timeout_of_one_thread_is_its_own(sidecar: SidecarProcess) -> None:
    with sidecar.connect(timeout=1.0) as client:
        sidecar.send_signal(signal.SIGSTOP)
        errors: list[Exception] = []

        def call() -> None:
            try:
                client.stats()
            except mmcache.RequestTimeout as error:
                errors.append(error)

        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sidecar.send_signal(signal.SIGCONT)
        assert len(errors) == 3
        eventually(lambda: works(client), "it goes on")


def test_a_signal_handler_may_close_and_nothing_else(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as observer, sidecar.connect() as client:
        raised: list[Exception] = []

        def handler(number: int, frame: object) -> None:
            try:
                client.stats()
            except mmcache.ClientClosed as error:
                raised.append(error)
            client.close()

        pictures = [image(seed, 840, 1120) for seed in range(100, 140)]
        before = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        try:
            with pytest.raises(mmcache.MMCacheError):
                client.encode(pictures)
        finally:
            signal.signal(signal.SIGALRM, before)
        assert "under way" in str(raised[0])
        eventually(lambda: observer.stats()["leases"] == idle_leases(1), "nothing of it is left")


def test_a_frozen_sidecar_is_a_timeout_and_then_goes_on(sidecar: SidecarProcess) -> None:
    with sidecar.connect(timeout=0.5) as client:
        sidecar.send_signal(signal.SIGSTOP)
        try:
            for _ in range(2):
                with pytest.raises(mmcache.RequestTimeout):
                    client.stats()
                with pytest.raises(mmcache.RequestTimeout):
                    client.encode([image(1)])
        finally:
            sidecar.send_signal(signal.SIGCONT)
        eventually(lambda: works(client), "it goes on")
        assert client.stats()["leases"]["active"] == 0


def works(client: mmcache.Client) -> bool:
    try:
        client.encode([image(2)])[0].release()
    except (mmcache.RequestTimeout, mmcache.EncodeError):
        return False
    return True
