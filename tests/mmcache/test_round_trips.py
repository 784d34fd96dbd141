"""How often each call waits for the sidecar: the table of docs/protocol.md."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import mmcache
from mmcache import link
from mmcache.duplex import DuplexChannel
from mmcache.framing import PREFIX, Frame, Kind, OutgoingFrame
from tests.mmcache.support import SidecarProcess, eventually, image


class CountingChannel(DuplexChannel):
    """The client's channel, and what goes through it.

    Attributes:
        sent: kinds of frames that were handed to the socket.
        trips: how often a frame was waited for after something was sent: round trips, as time counts them.
    """

    def __init__(self, *args: Any, **arguments: Any) -> None:
        super().__init__(*args, **arguments)
        self.sent: list[Kind] = []
        self.trips = 0
        self._has_asked = False

    def send(self, frame: OutgoingFrame, deadline: float | None = None) -> None:
        self._note([frame])
        super().send(frame, deadline)

    def send_some(self, frames: deque[OutgoingFrame]) -> bool:
        self._note(frames)
        assert super().send_some(frames), "these are small: they count once"
        return True

    def receive(self, deadline: float | None = None) -> Frame:
        frame = super().receive(deadline)
        self._count()
        return frame

    def next_frame(self, deadline: float, wants_to_send: Callable[[], bool]) -> Frame | None:
        frame = super().next_frame(deadline, wants_to_send)
        if frame is not None:
            self._count()
        return frame

    def _note(self, frames: deque[OutgoingFrame] | list[OutgoingFrame]) -> None:
        self.sent += [Kind(PREFIX.unpack_from(frame.data)[1]) for frame in frames]
        self._has_asked |= bool(frames)

    def _count(self) -> None:
        self.trips += self._has_asked
        self._has_asked = False


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    with SidecarProcess(tmp_path_factory.mktemp("trips")) as sidecar:
        yield sidecar


@pytest.fixture
def client(sidecar: SidecarProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[mmcache.Client]:
    monkeypatch.setattr(link, "DuplexChannel", CountingChannel)
    with sidecar.connect() as client:
        yield client


def counted(client: mmcache.Client, call: Callable[[], Any]) -> tuple[int, list[Kind], Any]:
    """Round trips that a call took, the frames that it sent, and its result."""
    channel = client._pump.channel
    assert isinstance(channel, CountingChannel)
    client._pump.poll()  # what came by itself
    channel.trips, channel.sent, channel._has_asked = 0, [], False
    result = call()
    return channel.trips, list(channel.sent), result


def release(leases: list[mmcache.Lease]) -> None:
    for lease in leases:
        lease.release()


def test_connect(client: mmcache.Client) -> None:
    channel = client._pump.channel
    assert isinstance(channel, CountingChannel)
    assert (channel.trips, channel.sent) == (1, [Kind.HELLO])


@pytest.mark.parametrize("num_items", [1, 32, 100])
def test_encode_is_one_for_hits_and_two_for_misses_of_a_window(client: mmcache.Client, num_items: int) -> None:
    """A window: the sidecar asks for the bytes of up to 32 items at once."""
    pictures = [image(1000 * num_items + number, 28, 28) for number in range(num_items)]
    trips, sent, leases = counted(client, lambda: client.encode(pictures))
    assert {lease.origin for lease in leases} == {"encoded"}
    assert sent == [Kind.ENCODE] + [Kind.SUPPLY] * (len(sent) - 1)
    if num_items <= 32:
        assert (trips, len(sent)) == (2, 2)
    else:
        assert -(-num_items // 32) + 1 <= trips <= num_items, "as places in the window become free"
    release(leases)
    for given in (None, [client.key(picture) for picture in pictures]):
        trips, sent, leases = counted(client, lambda given=given: client.encode(pictures, keys=given))
        assert {lease.origin for lease in leases} == {"pool"}
        assert (trips, sent) == (1, [Kind.ENCODE])
        release(leases)
    trips, sent, leases = counted(client, lambda: client.encode(pictures, consumers=2))
    assert (trips, sent) == (1, [Kind.ENCODE])
    client.cancel(*(lease.ref for lease in leases))
    release(leases)


def test_encode_of_more_than_1024_hits_waits_once(client: mmcache.Client) -> None:
    """Its parts are sent while the sidecar looks up those before; nothing is waited for in between."""
    pictures = [image(number % 3, 28, 28) for number in range(2500)]
    release(client.encode(pictures[:3]))
    trips, sent, leases = counted(client, lambda: client.encode(pictures))
    assert (trips, sent) == (1, [Kind.ENCODE] * 3)
    release(leases)


def test_encode_of_more_than_a_window_of_parts_takes_turns(
    client: mmcache.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmcache.parts.PART_BYTES", 1)
    monkeypatch.setattr("mmcache.encode_call.WINDOW_PARTS", 4)
    pictures = [image(number % 3, 28, 28) for number in range(12)]
    release(client.encode(pictures[:3]))
    trips, sent, leases = counted(client, lambda: client.encode(pictures))
    assert (trips, sent) == (3, [Kind.ENCODE] * 12)
    release(leases)


def test_open_is_one_for_up_to_1024(client: mmcache.Client) -> None:
    leases = client.encode([image(1, 28, 28)] * 8, consumers=2)
    refs = [lease.ref for lease in leases]
    trips, sent, copy = counted(client, lambda: client.open(refs[0]))
    assert (trips, sent) == (1, [Kind.OPEN])
    copies = []
    for wanted in (refs, refs[1:] * 200):
        trips, sent, results = counted(client, lambda wanted=wanted: client.open(wanted, errors="return"))
        assert (trips, sent) == (-(-len(wanted) // 1024), [Kind.OPEN] * trips)
        copies += [result for result in results if isinstance(result, mmcache.Lease)]
    assert len(copies) == 15, "every share once"
    release([copy, *copies, *leases])


def test_stage_is_one_for_up_to_64_the_first_too(client: mmcache.Client) -> None:
    pixels = [image(seed, 28, 28) for seed in range(100)]
    trips, sent, first = counted(client, lambda: client.stage(pixels[0]))
    assert (trips, sent) == (1, [Kind.STAGE, Kind.STAGED])
    trips, sent, later = counted(client, lambda: client.stage_all(pixels[:64]))
    assert (trips, sent) == (1, [Kind.STAGE, Kind.STAGED])
    trips, sent, many = counted(client, lambda: client.stage_all(pixels))
    assert (trips, sent) == (2, [Kind.STAGE, Kind.STAGE, Kind.STAGED])
    client.cancel(first, *later, *many)


def test_encode_of_staged_pixels_is_one_hit_or_miss(client: mmcache.Client) -> None:
    """The pixels are there already."""
    for origin in ("encoded", "pool"):
        refs = client.stage_all([image(seed, 28, 28) for seed in range(500, 540)])
        trips, sent, leases = counted(client, lambda refs=refs: client.encode(refs))
        assert {lease.origin for lease in leases} == {origin}
        assert (trips, sent) == (1, [Kind.ENCODE])
        release(leases)


def test_lookup_is_one_for_up_to_1024(client: mmcache.Client) -> None:
    key = client.key(image(1))
    for num_keys in (1, 1024, 1025):
        trips, sent, found = counted(client, lambda num_keys=num_keys: client.lookup([key] * num_keys))
        assert len(found) == num_keys
        assert (trips, sent) == (-(-num_keys // 1024), [Kind.LOOKUP] * trips)


def test_put_is_one(client: mmcache.Client) -> None:
    embedding = np.ones((6, client.dim), np.float32)
    for is_new in (True, False):
        trips, sent, result = counted(client, lambda: client.put(client.key(b"elsewhere"), embedding, (1, 4, 6)))
        assert (trips, sent, result) == (1, [Kind.PUT], is_new)


def test_questions_are_one(client: mmcache.Client) -> None:
    for call, kind in ((client.stats, Kind.STATS), (client.leases, Kind.LEASES), (client.reload, Kind.RELOAD)):
        trips, sent, _ = counted(client, call)
        assert (trips, sent) == (1, [kind])
    trips, sent, _ = counted(client, lambda: client.leases(check=True))
    assert (trips, sent) == (1, [Kind.LEASES])
    for num_keys in (0, 1, 1024, 1025):
        keys = [client.key(image(1))] * num_keys
        trips, sent, _ = counted(client, lambda keys=keys: client.evict(keys, everything=not keys))
        assert (trips, sent) == (-(-num_keys // 1024) or 1, [Kind.EVICT] * trips)


def test_submit_is_what_encode_is(client: mmcache.Client) -> None:
    for origin, expected in (("encoded", (2, [Kind.ENCODE, Kind.SUPPLY])), ("pool", (1, [Kind.ENCODE]))):
        trips, sent, leases = counted(client, lambda: client.submit([image(77)]).result())
        assert [lease.origin for lease in leases] == [origin]
        assert (trips, sent) == expected
        release(leases)


def test_what_waits_for_nothing(sidecar: SidecarProcess, client: mmcache.Client) -> None:
    """The sidecar stands still meanwhile."""
    leases = client.encode([image(1), image(2)], consumers=2)
    staged = client.stage(image(3))
    refs = [lease.ref for lease in leases]
    sidecar.send_signal(signal.SIGSTOP)
    try:
        assert counted(client, lambda: client.plan([image(1), b"no picture"]))[:2] == (0, [])
        assert counted(client, lambda: client.key(image(1)))[:2] == (0, [])
        assert counted(client, lambda: (client.fingerprint, client.dim, client.dtype))[:2] == (0, [])
        assert counted(client, lambda: leases[0].numpy().sum())[:2] == (0, [])
        assert counted(client, lambda: client.cancel(*refs, staged))[:2] == (0, [Kind.WITHDRAW])
        assert counted(client, lambda: release(leases))[:2] == (0, [])
        trips, sent, handle = counted(client, lambda: client.submit([image(4)]))
        assert (trips, [kind for kind in sent if kind != Kind.ACKNOWLEDGE]) == (0, [Kind.ENCODE])
        assert counted(client, handle.poll) == (0, [], False)
        assert counted(client, handle.cancel)[:2] == (0, [Kind.CANCEL])
        assert counted(client, client.close)[:2] == (0, [Kind.BYE])
    finally:
        sidecar.send_signal(signal.SIGCONT)
    eventually(lambda: sidecar.stats()["pool"]["bytes_leased"] == 0, "all of it was heard")
