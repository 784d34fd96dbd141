"""Frames: cut anywhere, beyond their bounds, with descriptors that no frame counts."""

from __future__ import annotations

import array
import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmcache.errors import ProtocolError
from mmcache.framing import MAGIC, MAX_BODY_BYTES, PREFIX, FrameReader, Kind, pack_frame, parse
from mmcache.protocol import Cancel
from mmcache.transport import receive_once, rights


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.binary(max_size=300)), max_size=6), st.integers(1, 50))
def test_frames_survive_any_cut(messages: list[tuple[int, bytes]], step: int) -> None:
    stream = b"".join(pack_frame(Kind.CANCEL, Cancel(request_id=id_), body).data for id_, body in messages)
    reader, frames = FrameReader(), []
    for start in range(0, len(stream), step):
        reader.feed(stream[start : start + step])
        while (frame := reader.next_frame()) is not None:
            frames.append((parse(Cancel, frame).request_id, frame.body))
    assert frames == messages


@given(st.binary(max_size=200))
def test_garbage_never_does_more_than_raise(data: bytes) -> None:
    reader = FrameReader()
    reader.feed(data)
    try:
        frame = reader.next_frame()
    except ProtocolError:
        return
    assert frame is None or len(frame.header) + len(frame.body) + PREFIX.size <= len(data)


@pytest.mark.parametrize(
    "prefix",
    [
        PREFIX.pack(0x1234, 1, 0, 0, 0, 0),
        PREFIX.pack(MAGIC, 1, 0, 0, 0, MAX_BODY_BYTES + 1),
        PREFIX.pack(MAGIC, 1, 0, 0, 2**32 - 1, 0),
        PREFIX.pack(MAGIC, 1, 17, 0, 0, 0),
        PREFIX.pack(MAGIC, 1, 1, 0, 0, 0),
        PREFIX.pack(MAGIC, 1, 0, 1, 0, 0),
    ],
    ids=["magic", "body", "header", "descriptors", "missing descriptor", "reserved"],
)
def test_bounds_are_checked_on_the_prefix(prefix: bytes) -> None:
    reader = FrameReader()
    reader.feed(prefix)
    with pytest.raises(ProtocolError):
        reader.next_frame()


def test_headers_are_validated() -> None:
    reader = FrameReader()
    reader.feed(PREFIX.pack(MAGIC, Kind.CANCEL, 0, 0, 2, 0) + b"{}")
    frame = reader.next_frame()
    assert frame is not None
    with pytest.raises(ProtocolError, match="request_id"):
        parse(Cancel, frame)


def test_descriptors_stay_with_their_frames() -> None:
    left, right = socket.socketpair()
    with left, right:
        reads, reader = [], FrameReader()
        for number in range(3):
            read_end, write_end = os.pipe()
            os.write(write_end, bytes([number]))
            os.close(write_end)
            frame = pack_frame(Kind.CANCEL, Cancel(request_id=number), fds=[read_end])
            left.sendmsg([frame.data], rights(frame))
            left.send(pack_frame(Kind.CANCEL, Cancel(request_id=100 + number)).data)
            os.close(read_end)
        while len(reads) < 6:
            receive_once(right, reader)
            while (got := reader.next_frame()) is not None:
                byte = os.read(got.fds[0], 1)[0] if got.fds else None
                reads.append((parse(Cancel, got).request_id, byte))
                for fd in got.fds:
                    assert os.get_inheritable(fd) is False
                    os.close(fd)
    assert reads == [(0, 0), (100, None), (1, 1), (101, None), (2, 2), (102, None)]


def test_uncounted_descriptors_are_refused_and_closed() -> None:
    left, right = socket.socketpair()
    with left, right:
        data = pack_frame(Kind.CANCEL, Cancel(request_id=1)).data
        left.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))])
        before = set(os.listdir("/proc/self/fd"))
        reader = FrameReader()
        receive_once(right, reader)
        with pytest.raises(ProtocolError, match="no frame counts"):
            reader.next_frame()
        reader.close()
        assert set(os.listdir("/proc/self/fd")) == before


def drain(sock: socket.socket, reader: FrameReader) -> None:
    """Receives to the end of the stream, which completes no frame."""
    while receive_once(sock, reader):
        assert reader.next_frame() is None


def test_descriptors_do_not_pile_up() -> None:
    """A frame that never completes, with more descriptors on every byte of it."""
    left, right = socket.socketpair()
    with left, right:
        before = len(os.listdir("/proc/self/fd"))
        left.send(PREFIX.pack(MAGIC, Kind.SUPPLY, 1, 0, 0, 1000))
        reader = FrameReader()
        flood = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 16))]
        for _ in range(3):
            left.sendmsg([b"x"], flood)
        left.close()
        with pytest.raises(ProtocolError, match="descriptors wait for their frames"):
            drain(right, reader)
        reader.close()
        assert len(os.listdir("/proc/self/fd")) == before - 1, "all are closed, and `left`"
