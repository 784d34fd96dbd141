"""Calls that have a part of what they want, and wait for the rest of it in a full pool: never on each other."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

import mmcache
from tests.mmcache.places import (
    PLACES,
    SIDE,
    arrived,
    big,
    counters,
    digest,
    digests,
    ends,
    pixels,
    python,
    release,
)
from tests.mmcache.support import SidecarProcess, eventually

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


def test_calls_of_staged_pixels_do_not_wait_on_each_other(full: SidecarProcess) -> None:
    """Their grants are not taken back: the later call ends, with what it has, and the earlier one gets the rest."""
    with full.connect(timeout=60) as client, full.connect(timeout=60) as one, full.connect(timeout=60) as other:
        release(client.encode(big(1, 2, 3, 4)))
        first = one.submit([*one.stage_all(big(1, 2)), *big(21)], errors="return")
        second = other.submit([*other.stage_all(big(3, 4)), *big(22)], errors="return")
        eventually(lambda: [first.poll(), second.poll()][1], "the later one ends by itself", 30)
        results = second.result()
        assert isinstance(results[2], mmcache.PoolExhausted)
        assert "staged" in results[2].reason
        release(results[:2])
        release(first.result())
        assert client.stats()["leases"]["active"] == 0
