"""From a socket's path to a connection that is greeted, on an asyncio loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path

from mmcache.aio_pump import AsyncPump, Watch
from mmcache.core import ClientCore
from mmcache.duplex import DuplexChannel
from mmcache.errors import ConnectionLost, RequestTimeout, SidecarUnavailable
from mmcache.framing import Frame, OutgoingFrame
from mmcache.handshake import Target, hello, unavailable, welcomed
from mmcache.link import pauses

RETRY_S = 0.005
"""Pause while a sidecar has more connections waiting than it lets wait."""


async def connect_pump(target: Target, deadline: float) -> AsyncPump:
    """Connect and say who this is.

    Raises:
        SidecarUnavailable, ProtocolMismatch, RequestTimeout: as `shake_hands` does.
    """
    return await greeted(DuplexChannel(await _connected(target.path, deadline)), target, deadline)


async def greeted(channel: DuplexChannel, target: Target, deadline: float) -> AsyncPump:
    """Say who this is, on a new connection. It is closed if that fails; raises as `shake_hands` does."""
    path, _, namespace, ordinal, foreign = target
    try:
        frame = await _greeted(channel, target, deadline)
        welcome, control_fd = welcomed(frame, foreign)
    except BaseException:
        channel.close()
        raise
    return AsyncPump(ClientCore(welcome, control_fd, namespace, ordinal, foreign), channel, path)


async def connect_again(
    target: Target, deadline: float, pause: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> AsyncPump:
    """Connect to a sidecar that may not be back yet: at once, then after pauses that double, until the deadline.

    Raises:
        SidecarUnavailable: it did not come back.
        ProtocolMismatch, RequestTimeout: as `shake_hands` does.
    """
    for pause_s in pauses():
        try:
            return await connect_pump(target, deadline)
        except SidecarUnavailable:
            if time.monotonic() + pause_s >= deadline:
                raise
            await pause(pause_s)
    raise AssertionError("pauses do not end")


async def _connected(path: Path, deadline: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        while True:
            try:
                sock.connect(os.fspath(path))
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
                await asyncio.sleep(RETRY_S)
            else:
                return sock
    except OSError as error:
        sock.close()
        raise unavailable(path, error) from error
    except BaseException:
        sock.close()
        raise


async def _greeted(channel: DuplexChannel, target: Target, deadline: float) -> Frame:
    """The answer to HELLO."""
    path, outbox = target.path, deque([hello(target.name, target.namespace, target.foreign)])
    try:
        async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
            return await _exchanged(channel, outbox)
    except TimeoutError:
        raise RequestTimeout(f"{path} did not answer the handshake in time") from None
    except ConnectionLost as error:
        raise SidecarUnavailable(f"{path} closed the connection: {error}") from error
    finally:
        for frame in outbox:
            frame.discard()


async def _exchanged(channel: DuplexChannel, outbox: deque[OutgoingFrame]) -> Frame:
    ready = asyncio.Event()
    watch = Watch(channel.fileno(), ready.set)
    try:
        while True:
            is_sent = True
            # A sidecar that refuses may have closed already; what it said first is still there to be read.
            with contextlib.suppress(ConnectionLost):
                is_sent = channel.send_some(outbox)
            if (frame := channel.frame_there()) is not None:
                return frame
            watch.watch(reads=True, writes=not is_sent)
            ready.clear()
            await ready.wait()
    finally:
        watch.close()
