"""A pool that is too small for what is asked for: whoever came first is served first, and nobody waits in vain."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import mmcache
from tests.mmcache.places import PLACES, SIDE, arrived, big, counters, decoded, digests, pixels, python, release
from tests.mmcache.support import SidecarProcess, eventually, image

BUSY_CLIENT = """
import hashlib
import random
import sys
import mmcache
from tests.mmcache.support import image

socket, seed, rounds, expected = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
draw = random.Random(seed)
pictures = [image(number, 448, 448) for number in range(len(expected))]
with mmcache.connect(socket, timeout=60) as client:
    for _ in range(rounds):
        chosen = draw.sample(range(len(pictures)), draw.randint(1, 3))
        leases = client.encode([pictures[number] for number in chosen])
        for number, lease in zip(chosen, leases, strict=True):
            assert hashlib.sha256(lease.numpy().tobytes()).hexdigest() == expected[number], number
            lease.release()
print("done", flush=True)
"""


def test_processes_that_want_more_than_there_is(full: SidecarProcess) -> None:
    with full.connect(timeout=60) as client:
        expected = digests(client, range(7))
        busy = [python(BUSY_CLIENT, str(full.socket), str(seed), "8", *expected) for seed in range(3)]
        outputs = [process.communicate(timeout=120)[0] for process in busy]
        assert outputs == ["done\n"] * 3


def test_a_small_item_does_not_overtake(tmp_path: Path) -> None:
    """In a sidecar of its own: small items leave places that no large one fits into."""
    with SidecarProcess(tmp_path, pool_bytes="1MiB") as sidecar:
        does_not_overtake(*(sidecar.connect(timeout=60) for _ in range(3)))


def does_not_overtake(holder: mmcache.Client, early: mmcache.Client, late: mmcache.Client) -> None:
    with holder, early, late:
        held = [*holder.encode(big(1, 2, 3)), *holder.encode([image(5)])]  # most of the last place is free
        before = counters(holder)
        first = early.submit(big(11))
        eventually(lambda: first.poll() or (counters(holder) - before)["room_waits"] > 0, "the large one waits")
        num_bytes = pixels(holder)
        second = late.submit([image(6)])
        eventually(lambda: second.poll() or pixels(holder) > num_bytes, "the small one is decoded")
        num_waits = counters(holder)["room_waits"]
        eventually(lambda: counters(holder)["room_waits"] > num_waits + 50, "time passes")
        assert not second.poll()
        assert not first.poll()
        held.pop(0).release()
        release([*held, *first.result(), *second.result()])
        assert (counters(holder) - before)["recalls"] == 0


def test_room_goes_to_the_earliest_call(full: SidecarProcess) -> None:
    """Three calls wait; the one whose pictures are decoded last is the first call, and gets the first place."""
    clients = [full.connect(timeout=60) for _ in range(3)]
    with full.connect() as holder:
        held = holder.encode(big(1, 2, 3, 4))
        num_items = counters(holder)["items"]
        handles: list[mmcache.Handle] = []
        for number, client in enumerate(clients, 1):
            handles.append(client.submit(big(10 + number)))
            arrived(holder, num_items + number)
        num_bytes = pixels(holder)
        for number, handle in enumerate(reversed(handles), 1):
            decoded(holder, handle, num_bytes + number * SIDE * SIDE * 3)
        for number, handle in enumerate(handles):
            held.pop().release()
            eventually(handle.poll, f"call {number} is served")
            assert not any(later.poll() for later in handles[number + 1 :])
        for handle, client in zip(handles, clients, strict=True):
            release(handle.result())
            client.close()
        release(held)


def larger_than_the_pool(full: SidecarProcess) -> None:
    with full.connect(timeout=60) as client:
        results: list[object] = [*client.encode(big(1, 2, 3, 4, 5, 6), errors="return")]
        leases = [result for result in results if isinstance(result, mmcache.Lease)]
        errors = [result for result in results if isinstance(result, mmcache.PoolExhausted)]
        assert (len(leases), len(errors)) == (PLACES, 2)
        for error in errors:
            assert results.index(error) == error.index
            assert "this call itself holds 1048576 of 1048576 bytes of the pool" in error.reason
        release(leases)


def test_a_call_larger_than_the_pool(full: SidecarProcess) -> None:
    """What fits is served; the rest fails at once: the reason would be another one at the deadline."""
    larger_than_the_pool(full)


@pytest.mark.usefixtures("one_item_a_part")
def test_a_call_of_parts_larger_than_the_pool(full: SidecarProcess) -> None:
    larger_than_the_pool(full)


def test_an_item_larger_than_the_pool_evicts_nothing(full: SidecarProcess) -> None:
    with full.connect(timeout=60) as client:
        release(client.encode(big(1, 2, 3, 4)))
        before = client.stats()["pool"]
        (result,) = client.encode([image(9, 28 * 40, 28 * 40)], errors="return")
        assert isinstance(result, mmcache.PoolExhausted)
        assert "never fit" in result.reason
        assert client.stats()["pool"] == before
        leases = client.encode(big(1, 2, 3, 4))
        assert [lease.origin for lease in leases] == ["pool"] * PLACES
        (result,) = client.encode([image(9, 28 * 40, 28 * 40)], errors="return")
        assert isinstance(result, mmcache.PoolExhausted)
        assert "never fit" in result.reason, "also where everybody else waits"
        release(leases)


def test_the_biggest_holders_are_named(full: SidecarProcess) -> None:
    with full.connect(name="other") as other, full.connect(timeout=2, name="asker") as asker:
        gone = full.connect(name="closed")
        kept = gone.encode(big(1))[0].hold()
        gone.close()
        held = [*other.encode(big(2, 3)), *asker.encode(big(4))]
        (error,) = asker.encode(big(5), errors="return")
        assert isinstance(error, mmcache.PoolExhausted)
        me = f"(pid {os.getpid()})"
        first, *rest = error.reason.split("held by ")[1].split("; ")
        assert first == f"other {me}: 2 leases, 524288 bytes"
        assert sorted(rest) == [
            f"closed {me}: 1 leases in quarantine (its connection is closed, its process lives), 262144 bytes",
            f"this client itself {me}: 1 leases, 262144 bytes",
        ]
        release(held)
        del kept
