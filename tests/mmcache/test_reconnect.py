"""The sidecar dies under its clients: what each of them sees, and how those that may connect again."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import mmcache
from tests.mmcache.support import SidecarProcess, eventually, image


def caught_when_killed(sidecar: SidecarProcess, call: Callable[[], object]) -> tuple[BaseException, float]:
    """The error of a call that is under way when the sidecar is killed, and how long after that it came, in seconds."""
    outcome: list[tuple[BaseException, float]] = []

    def run() -> None:
        try:
            call()
        except mmcache.MMCacheError as error:
            outcome.append((error, time.monotonic()))

    sidecar.send_signal(signal.SIGSTOP)  # so that it does not answer before it dies
    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.05)
    killed_at = time.monotonic()
    sidecar.kill()
    thread.join(20)
    ((error, told_at),) = outcome
    return error, told_at - killed_at


CALLS: dict[str, Callable[[mmcache.Client], object]] = {
    "encode": lambda client: client.encode([image(7)]),
    "submit": lambda client: client.submit([image(7)]).result(),
    "stats": lambda client: client.stats(),
    "lookup": lambda client: client.lookup([client.key(image(1))]),
    "put": lambda client: client.put(client.key(image(8)), np.ones((1, client.dim), np.float32), (1, 2, 2)),
    "stage": lambda client: client.stage(image(9)),
    "reload": lambda client: client.reload(),
    "evict": lambda client: client.evict(everything=True),
}


def test_the_call_under_way_is_told_and_the_connection_stays_lost(
    sidecar: SidecarProcess, record_property: Callable[[str, object], None]
) -> None:
    """Every kind of call at once, each on a client of its own; then a new sidecar on the same socket."""
    clients = {name: sidecar.connect() for name in CALLS}
    leases = clients["encode"].encode([image(1), image(2)], consumers=1)
    expected = [lease.numpy().copy() for lease in leases]
    refs = [lease.ref for lease in leases]

    def all_calls() -> None:
        with ThreadPoolExecutor(len(CALLS)) as threads:
            told = {name: threads.submit(told_of, CALLS[name], clients[name]) for name in CALLS}
            for name, outcome in told.items():
                error, at = outcome.result()
                assert isinstance(error, mmcache.ConnectionLost), name
                assert isinstance(error, ConnectionError)
                record_property(f"{name} was told after ms", round((at - killed_at[0]) * 1000, 1))

    killed_at = [0.0]
    sidecar.send_signal(signal.SIGSTOP)
    thread = threading.Thread(target=all_calls)
    thread.start()
    time.sleep(0.2)
    killed_at[0] = time.monotonic()
    os.kill(sidecar.pid, signal.SIGKILL)
    thread.join(20)
    sidecar.wait()
    assert not thread.is_alive()
    sidecar.start()
    for client in clients.values():
        with pytest.raises(mmcache.ConnectionLost, match="connect again"):
            client.encode([image(1)])
        with pytest.raises(mmcache.ConnectionLost):
            client.submit([image(1)])
        with pytest.raises(mmcache.ConnectionLost):
            client.open(refs)
    for lease, embedding in zip(leases, expected, strict=True):
        np.testing.assert_array_equal(lease.numpy(), embedding)
        lease.release()
        with pytest.raises(mmcache.LeaseReleased):
            lease.numpy()
    for client in clients.values():
        client.close()
    assert sidecar.stats()["leases"]["active"] == 0


def told_of(call: Callable[[mmcache.Client], object], client: mmcache.Client) -> tuple[BaseException, float]:
    try:
        call(client)
    except mmcache.MMCacheError as error:
        return error, time.monotonic()
    raise AssertionError("the sidecar is dead")


def test_leases_outlive_sidecar_and_reconnection(sidecar: SidecarProcess) -> None:
    with sidecar.connect(reconnect=True) as client:
        old = client.encode([image(1), image(2), image(3)])
        expected = [lease.numpy().copy() for lease in old]
        tensor = old[0].hold()
        error, _ = caught_when_killed(sidecar, lambda: client.encode([image(4)]))
        assert isinstance(error, mmcache.ConnectionLost), "this call; not the next"
        sidecar.start()
        new = client.encode([image(1), image(2), image(3)])
        assert [lease.origin for lease in new] == ["encoded"] * 3
        assert [lease.key for lease in new] == [lease.key for lease in old], "its secret is in its state"
        for lease, same, embedding in zip(old, new, expected, strict=True):
            np.testing.assert_array_equal(lease.numpy(), embedding)
            np.testing.assert_array_equal(same.numpy(), embedding)
            assert not lease.is_released
        before = client.stats()["leases"]["active"]
        for lease in old:
            lease.release()
        assert client.stats()["leases"]["active"] == before == 3, "those of the dead sidecar are nothing to this one"
        np.testing.assert_array_equal(tensor.numpy(), expected[0])
        for lease in new:
            lease.release()
        with pytest.raises(mmcache.SliceGone):
            client.open(mmcache.SliceRef(5, str(new[0].key), str(client.fingerprint), "float32", 1, 1, 4, (1, 2, 2)))


def test_it_waits_for_a_sidecar_that_starts_later(sidecar: SidecarProcess) -> None:
    """Threads that share the client all come through, with one new connection."""
    with sidecar.connect(reconnect=True) as client:
        client.encode([image(1)])[0].release()
        sidecar.kill()
        descriptors = len(os.listdir("/proc/self/fd"))
        with ThreadPoolExecutor(6) as threads:
            calls = [threads.submit(client.encode, [image(seed)]) for seed in range(6)]
            time.sleep(0.1)
            assert [call.exception() for call in calls if call.done()] == [], "nobody is there yet"
            sidecar.start()
            leases = [call.result()[0] for call in calls]
        assert [lease.key for lease in leases] == [client.key(image(seed)) for seed in range(6)]
        stats = client.stats()
        assert (stats["leases"]["active"], stats["leases"]["connections"]) == (6, 1)
        for lease in leases:
            lease.release()
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) <= descriptors + 2, "the old connection's are closed"


def test_it_gives_up_at_its_timeout(sidecar: SidecarProcess) -> None:
    with sidecar.connect(reconnect=True, timeout=0.5) as client:
        error, _ = caught_when_killed(sidecar, client.stats)
        assert isinstance(error, mmcache.ConnectionLost)
        for call in (client.stats, lambda: client.encode([image(1)]), lambda: client.submit([image(1)])):
            began = time.monotonic()
            with pytest.raises(mmcache.SidecarUnavailable, match="nobody listens"):
                call()
            assert time.monotonic() - began > 0.1, "it has tried for a while"
        assert client.plan([image(1)]), "what needs no sidecar goes on"
        assert client.key(image(1))


def test_close_while_another_thread_connects_again(sidecar: SidecarProcess) -> None:
    client = sidecar.connect(reconnect=True)
    error, _ = caught_when_killed(sidecar, client.stats)
    assert isinstance(error, mmcache.ConnectionLost)
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(client.encode, [image(1)])
        time.sleep(0.05)
        client.close()
        sidecar.start()
        with pytest.raises(mmcache.ClientClosed):
            call.result()
    eventually(lambda: sidecar.stats()["leases"]["connections"] == 1, "no connection of it is left")


def test_a_new_secret_gives_new_keys_after_reconnecting(sidecar: SidecarProcess) -> None:
    """Whoever removes the state folder makes another sidecar of it: keys of before are worth nothing there."""
    with sidecar.connect(reconnect=True) as client:
        (lease,) = client.encode([image(1)])
        old, expected = lease.key, lease.numpy().copy()
        error, _ = caught_when_killed(sidecar, client.stats)
        assert isinstance(error, mmcache.ConnectionLost)
        for path in sorted((sidecar.folder / "state").rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        sidecar.start()
        assert client.lookup([old]) == [None]
        (again,) = client.encode([image(1)])
        assert again.key == client.key(image(1)) != old
        np.testing.assert_array_equal(again.numpy(), expected)
        again.release()
        lease.release()
