"""Frames to the sidecar's own processes go out together, in order, each with its own descriptors."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import threading
from collections.abc import Callable

import pytest

from mmcache.framing import MAX_DESCRIPTORS, MAX_JOINED_BYTES, Frame, Kind, OutgoingFrame, joined, pack_frame
from mmcache.server.channel import Channel, Poller
from mmcache.transport import BlockingChannel


def numbered(number: int, size: int, num_fds: int) -> OutgoingFrame:
    """A frame that says its number, and whose descriptors' content is its number too."""
    fds = []
    for _ in range(num_fds):
        fd = os.memfd_create("numbered")
        os.write(fd, number.to_bytes(4, "little"))
        fds.append(fd)
    return pack_frame(Kind.ENCODE, None, number.to_bytes(4, "little") + bytes(size), fds, owned=True)


def check(frame: Frame, number: int, size: int, num_fds: int) -> None:
    assert (int.from_bytes(frame.body[:4], "little"), len(frame.body), len(frame.fds)) == (number, size + 4, num_fds)
    for fd in frame.fds:
        assert int.from_bytes(os.pread(fd, 4, 0), "little") == number
        os.close(fd)


def exchanged(sizes: list[tuple[int, int]], between: Callable[[int], bool] = lambda _: False) -> int:
    """Send frames of those sizes and numbers of descriptors through a gathering channel; the calls that it took.

    `between` says after which of them the loop has a turn.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    received: list[Frame] = []

    def receive() -> None:
        channel = BlockingChannel(theirs)
        received.extend(channel.receive() for _ in sizes)
        channel.close()

    calls = 0

    async def send() -> None:
        nonlocal calls
        channel = Channel(Poller(asyncio.get_running_loop()), ours, lambda _: None, lambda _: None, gathers=True)
        write = channel._write

        def counted(frame: OutgoingFrame) -> bool:
            nonlocal calls
            calls += 1
            return write(frame)

        channel._write = counted  # type: ignore[method-assign]
        for number, (size, num_fds) in enumerate(sizes):
            channel.send(numbered(number, size, num_fds))
            if between(number):
                await asyncio.sleep(0)
        reader = threading.Thread(target=receive)
        reader.start()
        await asyncio.to_thread(reader.join)
        channel.close()

    asyncio.run(send())
    for number, (frame, (size, num_fds)) in enumerate(zip(received, sizes, strict=True)):
        check(frame, number, size, num_fds)
    return calls


def test_what_is_sent_in_one_turn_goes_out_in_one_call() -> None:
    assert exchanged([(10, 0)] * 50) == 1
    assert exchanged([(10, 1)] * MAX_DESCRIPTORS) == 1
    assert exchanged([(10, 0)] * 3, between=lambda _: True) == 3


def test_nothing_is_mixed_up() -> None:
    chance = random.Random(5)
    sizes = [(chance.choice([0, 100, 5000, 100_000]), chance.choice([0, 0, 1, 3, 16])) for _ in range(150)]
    exchanged(sizes, between=lambda _: chance.random() < 0.1)


def test_a_peer_that_does_not_read_at_once_gets_everything() -> None:
    exchanged([(60_000, 1)] * 40)


@pytest.mark.parametrize("num_fds", [0, 1, 7, MAX_DESCRIPTORS])
def test_as_much_is_joined_as_fits(num_fds: int) -> None:
    frames = [numbered(number, 1000, num_fds) for number in range(60)]
    together = list(joined(frames))
    assert b"".join(frame.data for frame in together) == b"".join(frame.data for frame in frames)
    assert all(len(frame.data) <= MAX_JOINED_BYTES and len(frame.fds) <= MAX_DESCRIPTORS for frame in together)
    assert len(together) == max(4, -(-60 * num_fds // (num_fds * (MAX_DESCRIPTORS // num_fds))) if num_fds else 4)
    for frame in together:
        frame.discard()
