"""A coordinator without processes, in the test's own loop, and a raw client of it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path

from encoder.config import ProcessorConfig
from mmcache.config_sources import load_settings
from mmcache.framing import Frame, Kind, OutgoingFrame, close_all, pack_frame
from mmcache.keys import Fingerprint
from mmcache.protocol import PROTOCOL_VERSION, Hello
from mmcache.server.coordinator import Coordinator
from mmcache.server.facts import ModelFacts
from mmcache.server.ingest import Ingest
from mmcache.tiers.tiered import TieredStore
from mmcache.transport import BlockingChannel


def home_without_ranks(folder: Path) -> Coordinator:
    """It looks up, asks for bytes and answers questions; nothing is ever encoded."""
    flags = {"state": str(folder / "state"), "socket": str(folder / "socket"), "store": "none"}
    settings = load_settings(flags, {}, None)
    home = Coordinator(settings, 1, Ingest(1 << 16), TieredStore([], 1.0, 0))
    processor = ProcessorConfig()
    home._facts = ModelFacts("moonvit-tiny", Fingerprint(bytes(16)), "float32", 64, 1, processor)
    return home


async def until(is_true: Callable[[], bool], what: str) -> None:
    """Wait for a condition; the bound is for a loaded machine and asserts no speed."""
    for _ in range(20_000):
        if is_true():
            return
        await asyncio.sleep(0.001)
    raise AssertionError(f"not within 20 s: {what}")


class RawClient:
    """One connection to a coordinator, for frames that no client would send. Use `open`."""

    def __init__(self, channel: BlockingChannel) -> None:
        self._channel = channel

    @classmethod
    async def open(cls, home: Coordinator) -> RawClient:
        ours, theirs = socket.socketpair()
        home.accept(theirs)
        ours.settimeout(20)
        client = cls(BlockingChannel(ours))
        hello = Hello(protocol=PROTOCOL_VERSION, name="raw")
        await client.send(pack_frame(Kind.HELLO, hello, fds=[os.pidfd_open(os.getpid())], owned=True))
        assert (await client.receive()).kind == Kind.WELCOME
        return client

    async def send(self, *frames: OutgoingFrame) -> None:
        for frame in frames:
            await asyncio.to_thread(self._channel.send, frame)

    async def receive(self) -> Frame:
        frame = await asyncio.to_thread(self._channel.receive)
        close_all(frame.fds)
        return frame

    async def close(self, home: Coordinator) -> None:
        """Close it, and wait until nothing of it is left."""
        num_before = len(home.connections)
        self._channel.close()
        await until(lambda: len(home.connections) < num_before, "it is forgotten")
