"""Calls that go on by themselves: submit, poll, result, cancel."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import mmcache
from mmcache import parts
from tests.mmcache.support import SidecarProcess, eventually, image


def test_poll_until_done_then_the_leases_of_encode(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as client:
        handle = client.submit([image(1), image(2)])
        eventually(handle.poll, "it is encoded while this thread only looks")
        leases = handle.result()
        assert handle.result() is leases
        assert handle.poll()
        assert not handle.cancel(), "it is over"
        for lease, other in zip(leases, client.encode([image(1), image(2)]), strict=True):
            np.testing.assert_array_equal(lease.numpy(), other.numpy())
            lease.release()
            other.release()


def test_submit_does_not_wait_for_a_frozen_sidecar(sidecar: SidecarProcess) -> None:
    """Nor for the socket to take what is sent: the handles hold more than it buffers."""
    keys = [mmcache.ContentKey(number.to_bytes(16, "big")) for number in range(1000)]
    with sidecar.connect() as client:
        sidecar.send_signal(signal.SIGSTOP)
        try:
            handles = [client.submit([None] * 1000, keys=keys, errors="return") for _ in range(30)]
            assert not any(handle.poll() for handle in handles)
            with pytest.raises(TimeoutError, match="goes on"):
                handles[0].result(timeout=0.05)
        finally:
            sidecar.send_signal(signal.SIGCONT)
        for handle in handles:
            assert all(isinstance(result, mmcache.NotCached) for result in handle.result())


def test_many_handles_at_once_settle_in_any_order(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as client:
        handles = [client.submit([image(seed), image(seed + 1)]) for seed in range(20)]
        for seed in reversed(range(20)):
            leases = handles[seed].result()
            assert [lease.key for lease in leases] == [client.key(image(seed)), client.key(image(seed + 1))]
            for lease in leases:
                lease.release()
        assert client.stats()["leases"]["active"] == 0


def test_more_requests_than_may_be_in_flight(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as client:
        client.encode([image(1)])[0].release()
        key = client.key(image(1))
        sidecar.send_signal(signal.SIGSTOP)
        handles = [client.submit([None], keys=[key]) for _ in range(1100)]
        sidecar.send_signal(signal.SIGCONT)
        for handle in handles:
            handle.result()[0].release()
        assert client.stats()["leases"]["active"] == 0


def test_cancel_gives_everything_back(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as client:
        client.encode([image(1)])[0].release()
        handle = client.submit([image(1), *[image(seed, 840, 1120) for seed in range(200, 208)]])
        assert handle.cancel()
        assert not handle.cancel()
        assert handle.poll()
        with pytest.raises(mmcache.RequestCancelled):
            handle.result()
        eventually(lambda: client.stats()["leases"]["active"] == 0, "what was granted is released")


def test_a_dropped_handle_is_cancelled(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as client:
        client.encode([image(1)])[0].release()
        for _ in range(3):
            client.submit([image(1)])
        eventually(lambda: client.stats()["leases"]["active"] == 0, "nobody has seen those leases")


def test_a_handles_errors_are_those_of_encode(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as client:
        with pytest.raises(mmcache.EncodeError) as caught:
            client.submit([image(1), b"not a picture"]).result()
        good, bad = caught.value.results
        assert isinstance(good, mmcache.Lease)
        assert isinstance(bad, mmcache.UndecodableImage)
        caught.value.release()
        results = client.submit([b"", image(1)], errors="return").result()
        assert isinstance(results[0], mmcache.UndecodableImage)
        results[1].release()
        assert client.submit([]).result() == []


def test_a_deadline_passes_without_anybody_waiting(sidecar: SidecarProcess) -> None:
    with sidecar.connect(timeout=0.5) as client:
        sidecar.send_signal(signal.SIGSTOP)
        handle = client.submit([image(1)])
        eventually(handle.poll, "its deadline passed")
        with pytest.raises(mmcache.RequestTimeout):
            handle.result()
        sidecar.send_signal(signal.SIGCONT)
        eventually(lambda: not sidecar.stats()["leases"]["active"], "nothing is left of it")


def test_a_long_call_goes_on_by_polling(sidecar: SidecarProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """More parts than the window holds."""
    monkeypatch.setattr(parts, "PART_BYTES", 1)
    with sidecar.connect() as client:
        items = [image(seed % 5) for seed in range(100)]
        handle = client.submit(items)
        eventually(handle.poll, "all parts were asked for")
        leases = handle.result()
        assert [lease.key for lease in leases] == [client.key(item) for item in items]
        for lease in leases:
            lease.release()


def test_threads_share_a_handle(sidecar: SidecarProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 1)
    with sidecar.connect() as client, ThreadPoolExecutor(6) as threads:
        handle = client.submit([image(seed % 3) for seed in range(80)])
        found = list(threads.map(lambda _: handle.result(), range(6)))
        assert all(leases is found[0] for leases in found)
        assert len({id(lease) for lease in found[0]}) == 80
        for lease in found[0]:
            lease.release()
        assert client.stats()["leases"]["active"] == 0


def test_close_ends_the_calls_of_other_threads(sidecar: SidecarProcess) -> None:
    client = sidecar.connect()
    errors: list[Exception] = []

    def call() -> None:
        try:
            client.encode([image(seed, 840, 1120) for seed in range(300, 320)])
        except mmcache.MMCacheError as error:
            errors.append(error)

    with sidecar.connect() as observer:
        thread = threading.Thread(target=call)
        thread.start()
        eventually(lambda: observer.stats()["requests"] > 0, "it is under way")
        handle = client.submit([image(1)])
        client.close()
        thread.join(10)
        assert isinstance(errors[0], mmcache.ClientClosed)
        with pytest.raises(mmcache.ClientClosed):
            handle.result()
        eventually(lambda: observer.stats()["leases"]["active"] == 0, "nothing is left")


def test_keys_that_are_given_are_believed_for_hits_and_checked_for_misses(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as client:
        key = client.key(image(1))
        with client.encode([image(1)], keys=[key])[0] as lease:
            assert (lease.origin, lease.key) == ("encoded", key)
        with client.encode([None], keys=[key])[0] as lease:
            assert lease.origin == "pool"
        results = client.encode([image(2), None, image(1)], keys=[client.key(image(3)), client.key(image(4)), key],
                                errors="return")  # fmt: skip
        assert isinstance(results[0], mmcache.ContentMismatch)
        assert isinstance(results[1], mmcache.NotCached)
        assert [results[0].index, results[1].index] == [0, 1]
        results[2].release()
        assert client.stats()["items"]["encoded"] == 1
        with pytest.raises(ValueError, match="2 items need as many keys, got 1"):
            client.encode([image(1), image(2)], keys=[key])
        with pytest.raises(TypeError, match=r"keys\[0\] must be a ContentKey"):
            client.encode([image(1)], keys=["abc"])  # type: ignore[list-item]


def test_nothing_of_a_call_lives_on_in_cycles(sidecar: SidecarProcess) -> None:
    """Leases that are dropped end at once, and items are not kept, with no help of the collector."""
    with sidecar.connect() as client:
        gc.collect()
        gc.disable()
        try:
            picture = image(1)
            item = weakref.ref(picture)
            (lease,) = client.encode([picture])
            del picture
            assert item() is None
            with pytest.warns(ResourceWarning):
                del lease
            handle = client.submit([image(1)])
            (lease,) = handle.result()
            del handle
            with pytest.warns(ResourceWarning):
                del lease
            assert client.stats()["leases"]["active"] == 0
        finally:
            gc.enable()


def test_a_forked_child_cannot_use_its_parents_handle(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as client:
        handle = client.submit([image(seed, 420, 560) for seed in range(20)])
        child = os.fork()
        if child == 0:
            refused = 0
            for use in (handle.poll, handle.result, handle.cancel):
                try:
                    use()
                except mmcache.ClientClosed:
                    refused += 1
            del use, handle
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        leases = handle.result()
        assert len(leases) == 20
        for lease in leases:
            lease.release()
