"""What a decoder is given and what it gives: an item's bytes as a client sent them, and its pixels."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from mmcache.media import IMAGE
from mmcache.server.fair_queue import Ticket
from mmcache.server.flows import Flow
from mmcache.server.ingest import IngestSlice

if TYPE_CHECKING:
    from mmcache.server.decode_turn import Turn

OnSize: TypeAlias = Callable[[int, int, int], None]
"""Told height, width and number of frames (0: a picture), once, when the header is read."""

PIXELS_A_BYTE = 4
"""Of a file whose header nobody has read: photographs have 3 to 8, and what has more is found out by the header."""


class SharedDescriptor:
    """A descriptor that several items lie in, closed when the last of them is done."""

    __slots__ = ("_num_users", "fd")

    def __init__(self, fd: int) -> None:
        """Takes the descriptor over, with one user."""
        self.fd = fd
        self._num_users = 1

    def share(self) -> None:
        """One user more."""
        self._num_users += 1

    def release(self) -> None:
        """One user is done."""
        self._num_users -= 1
        if self._num_users == 0:
            os.close(self.fd)


class Supplied(NamedTuple):
    """An item's bytes as a client sent them: a claim until a decoder has hashed them."""

    memory: SharedDescriptor
    namespace: str
    kind: str
    header: bytes
    offset: int
    nbytes: int

    @property
    def predicted_pixels(self) -> int:
        """How many pixels it may have, by its bytes alone; at least 1."""
        return max(1, self.nbytes * PIXELS_A_BYTE if self.kind == IMAGE else self.nbytes // 3)


class Pixels(NamedTuple):
    """Decoded RGB pixels, uint8, in the ingest region; the holder frees the slice.

    A picture, `[height, width, 3]`, if `num_frames` is 0; else a video chunk, `[num_frames, height, width, 3]`.
    """

    part: IngestSlice
    height: int
    width: int
    num_frames: int

    @property
    def offset(self) -> int:
        """In the ingest region."""
        return self.part.offset


class Job:
    """One item on its way through the decoders.

    `is_urgent`: what is not waits for no room in the ingest region. `on_size(height, width, num_frames)` is called
    once, as soon as the header is read; the pixels come later, or an error does. What it raises ends the decoding.

    Attributes:
        flow: whose it is, and what share of the decoders that one has, against others that wait.
        is_waiting: in the pool's line for a process.
        had_turn: it was in the hands of a process, and waits for another one if it waits.
        ticket: its place there, until its first turn.
        granted: while it waits, what tells it of its turn.
    """

    __slots__ = ("_on_size", "flow", "granted", "had_turn", "is_urgent", "is_waiting", "item", "key", "ticket")

    def __init__(
        self, item: Supplied, key: bytes, flow: Flow | None = None,
        *, is_urgent: bool = True, on_size: OnSize | None = None,
    ) -> None:  # fmt: skip
        self.item = item
        self.key = key
        self.flow = flow or Flow(None)
        self.is_urgent = is_urgent
        self.is_waiting = False
        self.had_turn = False
        self.ticket: Ticket[Job] | None = None
        self.granted: asyncio.Future[Turn] | None = None
        self._on_size = on_size

    def tell_size(self, height: int, width: int, num_frames: int) -> None:
        """Tell whoever wants to know; one time only, however often it is tried."""
        on_size, self._on_size = self._on_size, None
        if on_size is not None:
            on_size(height, width, num_frames)
