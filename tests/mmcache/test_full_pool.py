"""A pool that is too small for what is asked for: whoever came first is served first, and nobody waits in vain."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import mmcache
import mmcache.parts
from tests.mmcache.support import SidecarProcess, eventually, image

PLACES = 4
"""Pictures of `SIDE` whose embeddings fill a pool of 1 MiB: 256 tokens of 1 KiB each."""
SIDE = 448
ROUNDS = 6

WAITING_CLIENT = """
import sys
import mmcache
from tests.mmcache.support import image

client = mmcache.connect(sys.argv[1], timeout=60, name="stopped")
print("connected", flush=True)
sys.stdin.readline()
leases = client.encode([image(int(seed), 448, 448) for seed in sys.argv[2:]])
print(len(leases), flush=True)
for lease in leases:
    lease.release()
client.close()
"""

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


def big(*seeds: int) -> list[Any]:
    return [image(seed, SIDE, SIDE) for seed in seeds]


def digest(lease: mmcache.Lease) -> str:
    return hashlib.sha256(lease.numpy().tobytes()).hexdigest()


def release(leases: list[mmcache.Lease]) -> None:
    for lease in leases:
        lease.release()


def counters(client: mmcache.Client) -> Counter[str]:
    """What a test looks at, so that it can be compared with what it was before."""
    stats = client.stats()
    of_pool = {name: stats["pool"][name] for name in ("recalls", "room_waits", "evictions")}
    return Counter({"items": stats["items"]["total"], "encoded": stats["items"]["encoded"]} | of_pool)


def arrived(client: mmcache.Client, num_items: int) -> None:
    eventually(lambda: counters(client)["items"] == num_items, "the call has arrived")


def decoded(client: mmcache.Client, call: mmcache.Handle, num_bytes: int) -> None:
    """Poll a call, which sends the bytes that it was asked for, until there are as many of pixels."""
    eventually(lambda: call.poll() or pixels(client) == num_bytes, "it is decoded")


def ends(call: mmcache.Handle, other: mmcache.Handle) -> None:
    """Poll both until one of them ends, which has to be the first."""
    eventually(lambda: other.poll() or call.poll(), "a call ends", 60)
    assert call.poll(), "it came first"


def pixels(client: mmcache.Client) -> int:
    """Bytes of decoded pictures, those that wait for room too."""
    nbytes = client.stats()["ingest"]["bytes_used"]
    assert isinstance(nbytes, int)
    return nbytes


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=Path(__file__).parents[2])


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    """A sidecar whose pool has four places."""
    with SidecarProcess(tmp_path_factory.mktemp("full"), pool_bytes="1MiB") as sidecar:
        yield sidecar


@pytest.fixture
def full(small: SidecarProcess) -> Iterator[SidecarProcess]:
    """That sidecar, with nothing in its pool that a test asks for; nothing is left of the test in the end."""
    with small.connect() as client:
        release(client.encode(big(901, 902, 903, 904)))
        yield small
        eventually(lambda: client.stats()["leases"]["active"] == 0, "every lease ends")
        eventually(lambda: pixels(client) == 0, "no pixels linger")
        assert client.stats()["pool"]["bytes_leased"] == 0
        assert client.leases(check=True)["problems"] == []


@pytest.fixture
def one_item_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every item is a request of its own."""
    monkeypatch.setattr(mmcache.parts, "PART_BYTES", 1)


class HalfServed:
    """An early call that waits for its bytes, and a later one that has two of three places and waits for the third.

    Two other leases are held: no call can end until one is released. The early call's bytes are sent when it is polled.
    """

    def __init__(self, full: SidecarProcess) -> None:
        self.holder, self._early, self.late = (full.connect(timeout=60) for _ in range(3))
        leases = self.holder.encode(big(1, 2, 3, 4))
        self.held = leases[2:]
        release(leases[:2])
        self._before = counters(self.holder)
        self.first = self._early.submit(big(11, 12, 13))
        arrived(self.holder, self._before["items"] + 3)
        self.second = self.late.submit(big(1, 2, 21))
        eventually(lambda: self.second.poll() or self.count("room_waits") > 50, "the later call waits for room")
        assert self.holder.stats()["leases"]["active"] == 4, "and has two leases"
        assert self.count("recalls") == 0

    def count(self, name: str) -> int:
        return counters(self.holder)[name] - self._before[name]

    def is_recalled(self) -> bool:
        """Go on with the early call, until the later call's grants are taken back; its client hears nothing of it."""
        self.first.poll()
        return self.count("recalls") == 2

    def close(self) -> None:
        release(self.held)
        for client in (self.holder, self._early, self.late):
            client.close()


def goes_to_an_earlier_one(full: SidecarProcess) -> None:
    calls = HalfServed(full)
    first, second = calls.first, calls.second
    eventually(calls.is_recalled, "the later call's grants are taken back")
    eventually(lambda: second.poll() or first.poll() or calls.count("encoded") == 2, "and go to the early one")
    calls.held.pop().release()
    eventually(first.poll, "which gets the place that becomes free too")
    assert not second.poll(), "the later one has nothing to end with"
    leases = first.result()
    assert [lease.origin for lease in leases] == ["encoded"] * 3
    release(leases)
    leases = second.result()
    assert [lease.num_tokens for lease in leases] == [256] * 3
    release(leases)
    calls.close()


def test_what_a_later_call_has_goes_to_an_earlier_one(full: SidecarProcess) -> None:
    goes_to_an_earlier_one(full)


@pytest.mark.usefixtures("one_item_a_part")
def test_parts_that_were_finished_are_opened_again(full: SidecarProcess) -> None:
    """What the later call had are requests of their own, with nothing left to do."""
    goes_to_an_earlier_one(full)


def test_what_is_taken_back_ends_with_a_cancel(full: SidecarProcess) -> None:
    calls = HalfServed(full)
    eventually(calls.is_recalled, "its grants are taken back")
    assert calls.second.cancel()
    eventually(lambda: calls.first.poll() or calls.count("encoded") == 2, "they are free")
    calls.held.pop().release()
    release(calls.first.result())
    calls.close()


def test_what_is_taken_back_ends_with_a_close(full: SidecarProcess) -> None:
    calls = HalfServed(full)
    eventually(calls.is_recalled, "its grants are taken back")
    calls.late.close()
    with pytest.raises(mmcache.ClientClosed):
        calls.second.result()
    calls.held.pop().release()
    release(calls.first.result())
    calls.close()


def test_shares_for_others_are_taken_back_too(full: SidecarProcess) -> None:
    with full.connect(timeout=60) as early, full.connect(timeout=60) as late, full.connect(timeout=60) as consumer:
        held = consumer.encode(big(1, 2, 3, 4))
        release(held[:2])
        before = counters(consumer)
        first = early.submit(big(11, 12))
        arrived(consumer, before["items"] + 2)
        second = late.submit(big(1, 2, 21), consumers=1)
        eventually(lambda: second.poll() or (counters(consumer) - before)["room_waits"] > 50, "the later call waits")
        ends(first, second)
        release(first.result())
        held[2].release()
        leases = second.result()
        claimed = consumer.open([lease.ref for lease in leases])
        assert [digest(lease) for lease in claimed] == [digest(lease) for lease in leases]
        assert (counters(consumer) - before)["recalls"] == 2
        release([*leases, *claimed, held[3]])


def digests(client: mmcache.Client, seeds: Sequence[int]) -> list[str]:
    """What each picture's embedding has to be."""
    found = []
    for seed in seeds:
        (lease,) = client.encode(big(seed))
        found.append(digest(lease))
        lease.release()
    return found


def both_always_complete(full: SidecarProcess) -> None:
    """Each of two clients has two of the three places that it wants, and waits for the third: of four."""
    wanted = [(0, 1, 2), (5, 4, 3)]
    draw = random.Random(1)
    with full.connect(timeout=60) as left, full.connect(timeout=60) as right, full.connect() as observer:
        expected = digests(observer, range(6))
        for turn in range(ROUNDS):
            one, two = (left, right) if turn % 2 else (right, left)
            release(observer.encode(big(*draw.sample(wanted[0], 2), *draw.sample(wanted[1], 2))))
            before = counters(observer)
            draw.shuffle(wanted)
            first = one.submit(big(*wanted[0]))
            arrived(observer, before["items"] + 3)
            second = two.submit(big(*wanted[1]))
            arrived(observer, before["items"] + 6)
            ends(first, second)
            for handle, seeds in zip((first, second), wanted, strict=True):
                leases = handle.result()
                assert [digest(lease) for lease in leases] == [expected[seed] for seed in seeds]
                release(leases)
            assert (counters(observer) - before)["recalls"] == 2


def test_two_that_want_three_of_four_places(full: SidecarProcess) -> None:
    both_always_complete(full)


@pytest.mark.usefixtures("one_item_a_part")
def test_two_in_parts(full: SidecarProcess) -> None:
    both_always_complete(full)


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


def test_a_stopped_client_keeps_what_it_has(full: SidecarProcess) -> None:
    with full.connect(timeout=60) as holder, full.connect(timeout=6) as early:
        held = holder.encode(big(1, 2, 3, 4))
        release(held[:2])
        before = counters(holder)
        late = python(WAITING_CLIENT, str(full.socket), "1", "2", "21")
        try:
            assert late.stdout is not None
            assert late.stdin is not None
            assert late.stdout.readline() == "connected\n"
            first = early.submit(big(11, 12, 13))
            arrived(holder, before["items"] + 3)
            print("go on", file=late.stdin, flush=True)
            eventually(lambda: (counters(holder) - before)["room_waits"] > 50, "the later call waits")
            os.kill(late.pid, signal.SIGSTOP)
            with pytest.raises(mmcache.EncodeError) as caught:
                first.result()
            assert (counters(holder) - before)["recalls"] == 2
            errors = [error for error in caught.value.results if isinstance(error, mmcache.PoolExhausted)]
            assert len(errors) == 3
            assert f"stopped (pid {late.pid}): 2 leases" in errors[0].reason
            os.kill(late.pid, signal.SIGCONT)
            held.pop().release()
            assert late.communicate(timeout=60)[0] == "3\n", "it gets again what was taken back"
        finally:
            late.kill()
            late.wait()
        release(early.encode(big(11, 12, 13)))
        release(held)


def test_decoded_pictures_give_way_to_an_earlier_call(tmp_path: Path) -> None:
    """The ingest region is full of pictures that wait for places, which a call has that waits for ingest memory."""
    with SidecarProcess(tmp_path, pool_bytes="1MiB", ingest_bytes="8MiB") as sidecar:
        gives_way(*(sidecar.connect(timeout=60) for _ in range(3)))


def gives_way(observer: mmcache.Client, early: mmcache.Client, late: mmcache.Client) -> None:
    with observer, early, late:
        release(observer.encode(big(1, 2, 3, 4)))
        num_items = counters(observer)["items"]
        first = early.submit(big(1, 2, 3, 11))
        arrived(observer, num_items + 4)
        others = [late.submit(big(*seeds)) for seeds in ((20, 21), *((seed,) for seed in range(22, 36)))]

        def is_full() -> bool:
            others[0].poll()  # one client, which sends the bytes of all that it is asked for
            has_place = observer.stats()["leases"]["active"] == PLACES
            return has_place and pixels(observer) == 13 * SIDE * SIDE * 3

        eventually(is_full, "no more pictures can be decoded, nor can the first of the later calls end")
        assert not any(other.poll() for other in others)
        eventually(lambda: any(other.poll() for other in others) or first.poll(), "a call ends", 60)
        assert observer.stats()["ingest"]["gave_way"] > 0
        release(first.result())
        for other in others:
            release(other.result())
        stats = observer.stats()
        assert stats["errors"] == {}
        assert (stats["leases"]["active"], stats["ingest"]["bytes_used"]) == (0, 0)


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
