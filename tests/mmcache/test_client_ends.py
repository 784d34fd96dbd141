"""What ends with a client, a handle or a question that nobody wants any more, and what more than enough at once is."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import mmcache
from mmcache.records import MAX_REQUESTS
from tests.mmcache.support import SidecarProcess, eventually, image

SLOW = (840, 1120)


def test_a_dropped_client_gives_back_its_region_and_keeps_its_leases(sidecar: SidecarProcess) -> None:
    observer = sidecar.connect()
    client = sidecar.connect()
    (lease,) = client.encode([image(1)])
    expected = lease.numpy().copy()
    client.stage(image(2))
    assert observer.stats()["staging"]["regions"] == 1
    clients = [client]
    del client
    with pytest.warns(ResourceWarning, match="dropped unclosed"):
        clients.clear()
    eventually(lambda: observer.stats()["staging"]["regions"] == 0, "nobody stages there any more")
    eventually(lambda: observer.stats()["leases"]["connections"] == 1, "it is gone")
    assert observer.stats()["leases"]["active"] == 1
    np.testing.assert_array_equal(lease.numpy(), expected)
    lease.release()
    eventually(lambda: observer.stats()["leases"]["active"] == 0, "it is acknowledged without the socket")
    observer.close()


def test_a_dropped_handle_ends_at_once(client: mmcache.Client, shared_sidecar: SidecarProcess) -> None:
    """Not only with its client's next call."""
    with shared_sidecar.connect() as observer:
        client.encode([image(31)])[0].release()
        handles = [client.submit([image(31)])]
        eventually(handles[0].poll, "it is done")
        assert observer.stats()["leases"]["active"] == 1
        handles.clear()
        eventually(lambda: observer.stats()["leases"]["active"] == 0, "nobody wants it")


def test_a_handle_dropped_while_another_thread_waits(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as client, sidecar.connect() as observer, ThreadPoolExecutor(1) as threads:
        handle = client.submit([image(1)])
        assert handle.result()[0].release() is None
        handle = client.submit([image(1)])
        eventually(handle.poll, "it is done")
        waiting = threads.submit(client.encode, [image(seed, *SLOW) for seed in range(500, 508)])
        time.sleep(0.1)
        del handle
        eventually(lambda: observer.stats()["leases"]["active"] in range(8) and not waiting.done(), "ended meanwhile")
        for lease in waiting.result():
            lease.release()
        eventually(lambda: observer.stats()["leases"]["active"] == 0, "nothing is left")


def test_cancel_wakes_who_waits(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as client:
        handle = client.submit([image(seed, *SLOW) for seed in range(600, 640)])
        raised: list[BaseException] = []

        def wait() -> None:
            try:
                handle.result()
            except mmcache.MMCacheError as error:
                raised.append(error)

        threads = [threading.Thread(target=wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        assert handle.cancel()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        assert [type(error) for error in raised] == [mmcache.RequestCancelled] * 3
        assert client.stats()["requests"] >= 1, "the connection goes on"


@pytest.mark.parametrize("timeout", [-1, float("nan"), -0.001])
def test_a_timeout_that_is_none(client: mmcache.Client, timeout: float) -> None:
    handle = client.submit([image(32)])
    with pytest.raises(ValueError, match="timeout"):
        handle.result(timeout)
    handle.result()[0].release()


def test_poll_of_a_lost_connection_says_so_by_result(sidecar: SidecarProcess) -> None:
    client = sidecar.connect()
    handle = client.submit([image(1, *SLOW)])
    sidecar.kill()
    assert handle.poll(), "result raises at once"
    assert handle.poll()
    with pytest.raises(mmcache.ConnectionLost):
        handle.result()
    client.close()


def test_what_errors_may_be(client: mmcache.Client) -> None:
    with pytest.raises(ValueError, match='"raise" or "return"'):
        client.open([], errors="bogus")  # type: ignore[call-overload]


def test_more_than_may_be_open_waits_for_its_turn(sidecar: SidecarProcess) -> None:
    """As many requests as a connection may have open; then more, and every other question, from many threads."""
    with sidecar.connect() as client:
        (known,) = client.encode([image(1)])
        key, rows = client.key(b"x"), known.numpy().copy()
        handles = [client.submit([image(seed, 28, 28)]) for seed in range(2000, 2000 + MAX_REQUESTS + 40)]
        questions = [
            lambda: client.lookup([known.key]),
            lambda: client.put(key, rows, known.grid_thw),
            lambda: client.stage(image(3)),
            client.stats,
            client.leases,
            lambda: [lease.release() for lease in client.encode([image(1)])],
        ]
        with ThreadPoolExecutor(12) as threads:
            answers = [threads.submit(question) for question in questions * 2]
            for answer in answers:
                answer.result()
        leases = [handle.result()[0] for handle in handles]
        assert len({lease.key for lease in leases}) == MAX_REQUESTS + 40
        for lease in (known, *leases):
            lease.release()


def test_a_call_that_can_never_be_staged_together_fails_at_once(tmp_path: Path) -> None:
    with SidecarProcess(tmp_path, staging_bytes="1MiB") as sidecar, sidecar.connect(timeout=30) as client:
        client.stage(image(1))
        items = [image(seed) for seed in range(100)]
        started = time.monotonic()
        with pytest.raises(mmcache.StagingExhausted, match="together can never be"):
            client.stage_all(items)
        assert time.monotonic() - started < 15, "it did not wait for itself"
        assert len(client.stage_all(items[:50])) == 50
