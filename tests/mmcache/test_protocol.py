"""Hostile bytes and frames against a real sidecar: they cost their own connection alone."""

from __future__ import annotations

import array
import os
import socket
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mmcache
from ipc.memory_shm import sealed_copy
from mmcache.framing import MAGIC, PREFIX, Kind, pack_frame, parse
from mmcache.handshake import shake_hands
from mmcache.protocol import PROTOCOL_VERSION, Cancel, Hello, Staged, StatsRequest, Supply, Unsettled, Withdraw
from mmcache.records import ENCODE_HEAD, STAGED_ITEM
from mmcache.transport import BlockingChannel
from tests.mmcache.support import SidecarProcess, encode_frame, eventually, image


def raw(sidecar: SidecarProcess) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(20)
    sock.connect(str(sidecar.socket))
    return sock


def greeted(sidecar: SidecarProcess) -> BlockingChannel:
    """A connection after its handshake, for frames that no client would send."""
    channel = BlockingChannel(raw(sidecar))
    pidfd = os.pidfd_open(os.getpid())
    channel.send(pack_frame(Kind.HELLO, Hello(protocol=PROTOCOL_VERSION, name="hostile"), fds=[pidfd], owned=True))
    for _ in range(3):
        frame = channel.receive()
        for fd in frame.fds:
            os.close(fd)
    return channel


def is_cut_off(channel: BlockingChannel) -> bool:
    try:
        while True:
            channel.receive()
    except mmcache.ConnectionLost:
        return True


@settings(max_examples=30, deadline=None)
@given(data=st.binary(min_size=16, max_size=400))
def test_garbage_costs_only_its_own_connection(shared_sidecar: SidecarProcess, data: bytes) -> None:
    with raw(shared_sidecar) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        sock.recv(1000)
    with shared_sidecar.connect() as client:
        client.encode([image(1)])[0].release()


def test_another_protocol_version_is_named(shared_sidecar: SidecarProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    from mmcache import handshake

    monkeypatch.setattr(handshake, "PROTOCOL_VERSION", 99)
    with pytest.raises(mmcache.ProtocolMismatch, match=r"protocol 99, this sidecar \(.*\) speaks 4"):
        shared_sidecar.connect()


def test_a_pidfd_of_another_process_is_refused(shared_sidecar: SidecarProcess) -> None:
    for fd in (os.pidfd_open(1), os.open("/dev/null", os.O_RDONLY)):
        channel = BlockingChannel(raw(shared_sidecar))
        channel.send(pack_frame(Kind.HELLO, Hello(protocol=PROTOCOL_VERSION), fds=[fd], owned=True))
        frame = channel.receive()
        assert frame.kind == Kind.REFUSED
        assert b"pidfd" in frame.header
        channel.close()


def unsealed(nbytes: int) -> int:
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    return fd


def test_hostile_frames_cut_off_their_sender(shared_sidecar: SidecarProcess, tmp_path: Path) -> None:
    supply = {"request_id": 1, "positions": [0], "kinds": ["array"], "headers": [b""], "offsets": [0], "sizes": [3]}

    def supplied(fd: int, **changes: object) -> bytes:
        frame = pack_frame(Kind.SUPPLY, Supply.model_validate(supply | changes), fds=[fd])
        return frame.data

    plain = os.open(tmp_path, os.O_RDONLY)
    sealed, _ = sealed_copy("sealed", [b"abc"])
    cases: list[tuple[bytes, list[int]]] = [
        (pack_frame(Kind.ENCODE, None, ENCODE_HEAD.pack(1, 1, 1, 1, 0, 0, 0) + bytes(17)).data, []),
        (pack_frame(Kind.ENCODE, None, ENCODE_HEAD.pack(1, 1, 1, 2, 0, 0, 0) + bytes(16)).data, []),
        (pack_frame(Kind.ENCODE, None, ENCODE_HEAD.pack(1, 1, 1, 1, 1025, 0, 0) + bytes(16)).data, []),
        (
            pack_frame(
                Kind.ENCODE, None, ENCODE_HEAD.pack(1, 1, 1, 1, 0, 0, 0) + bytes(16) + STAGED_ITEM.pack(1, 7)
            ).data,
            [],
        ),
        (pack_frame(Kind.ENCODE, None, ENCODE_HEAD.pack(1, 1, 1, 0, 0, 0, 0)).data, []),
        (pack_frame(Kind.ENCODE, None, b"").data, []),
        (pack_frame(Kind.ENCODE, None, ENCODE_HEAD.pack(1, 1, 1, 1025, 0, 0, 0) + bytes(16 * 1025)).data, []),
        (pack_frame(Kind.WELCOME, StatsRequest(ask_id=1)).data, []),
        (pack_frame(Kind.RESULTS, None, bytes(4)).data, []),
        (pack_frame(Kind.ACKNOWLEDGE, StatsRequest(ask_id=1), b"123").data, []),
        (pack_frame(Kind.OPEN, None, bytes(4)).data, []),
        (pack_frame(Kind.OPEN, None, bytes(4 + 8 * 1025)).data, []),
        (pack_frame(Kind.LOOKUP, None, bytes(4)).data, []),
        (pack_frame(Kind.LOOKUP, None, bytes(4 + 16 * 1025)).data, []),
        (pack_frame(Kind.WITHDRAW, Withdraw()).data, []),
        (pack_frame(Kind.STAGED, Staged(), bytes(12)).data, []),
        (PREFIX.pack(MAGIC, 999, 0, 0, 0, 0), []),
        (pack_frame(Kind.BYE, None, bytes(8 * 20_000)).data, []),
        (PREFIX.pack(MAGIC, Kind.CANCEL, 0, 0, 1 << 17, 0) + bytes(1 << 17), []),
        (supplied(0), [unsealed(4096)]),
        (supplied(0), [plain]),
        (supplied(0, sizes=[1 << 40]), [sealed]),
        (supplied(0, offsets=[1 << 63]), [sealed]),
        (supplied(0, kinds=["array", "array"]), [sealed]),
    ]
    for data, fds in cases:
        channel = greeted(shared_sidecar)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        channel._sock.sendmsg([data], ancillary)
        assert is_cut_off(channel), data
        channel.close()
    with shared_sidecar.connect() as client:
        client.encode([image(1)])[0].release()


def test_a_reused_request_id_poisons_no_key(shared_sidecar: SidecarProcess) -> None:
    keys = [b"k" * 15 + bytes([number]) for number in range(3)]
    channel = greeted(shared_sidecar)
    for _ in range(20):
        for key in keys:
            channel._sock.send(encode_frame(key, 2**32 - 1).data + pack_frame(Kind.CANCEL, Cancel(request_id=1)).data)
    channel._sock.send(encode_frame(keys[0], 2**32 - 1).data)
    channel.close()
    honest = greeted(shared_sidecar)
    honest.send(encode_frame(b"".join(keys)))
    asked: set[int] = set()
    while asked != {0, 1, 2}:
        asked |= set(parse(Unsettled, honest.receive()).need)
    honest.close()


def test_false_acknowledgements_change_nothing(shared_sidecar: SidecarProcess) -> None:
    """Another's slots, made-up generations and stores into words that were never granted."""
    with shared_sidecar.connect() as client, client.encode([image(2)])[0] as lease:
        expected = lease.numpy().copy()
        other = shared_sidecar.connect()
        token = lease._token
        other._core.control.acknowledge(token >> 32, token & 0xFFFFFFFF)
        for slot in range(1, 100):
            other._core.control.acknowledge(slot, 77)
        assert client.stats()["leases"]["active"] >= 1
        other.close()
        np.testing.assert_array_equal(lease.numpy(), expected)


def test_a_client_can_neither_write_nor_shorten_the_pool(sidecar: SidecarProcess) -> None:
    import ctypes
    import fcntl
    import mmap

    channel = BlockingChannel(raw(sidecar))
    _, control_fd = shake_hands(channel, sidecar.socket, "writer", "", time.monotonic() + 20)
    os.close(control_fd)
    (fd,) = channel.receive().fds
    size = os.fstat(fd).st_size
    with pytest.raises(PermissionError):
        mmap.mmap(fd, size, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(again, size, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    mapping = mmap.mmap(fd, size, prot=mmap.PROT_READ)
    address = np.frombuffer(mapping, np.uint8).ctypes.data
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(4096), 3) == -1
    os.close(again)
    os.close(fd)
    channel.close()


def test_handshake_without_words_is_ended(sidecar: SidecarProcess) -> None:
    with raw(sidecar) as sock:
        assert sock.recv(1) == b"", "silence before the handshake is cut off"
    eventually(lambda: sidecar.stats()["leases"]["connections"] == 1, "nothing of it is left")
