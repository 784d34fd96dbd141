"""Frames: how messages travel, between a client and the sidecar and between the sidecar and its own processes.

A frame is a 16-byte prefix (magic, kind, number of descriptors, header bytes, body bytes; little endian), a JSON
header that a pydantic model validates, and a binary body of fixed-size records. Descriptors travel beside the frame
that counts them. Every length is bounded before anything is allocated for it.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from mmcache.errors import ProtocolError

MAGIC = 0x434D
PREFIX = struct.Struct("<HHHHII")
MAX_HEADER_BYTES = 1 << 20
MAX_BODY_BYTES = 4 << 20
MAX_DESCRIPTORS = 16
MAX_JOINED_BYTES = 16 << 10
"""What one call sends of several frames: the system keeps so much in one piece, with its descriptors."""


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    POOL_ADDED = 4
    POOL_GONE = 5
    ENCODE = 6
    RESULTS = 7
    SUPPLY = 8
    CANCEL = 9
    ACKNOWLEDGE = 10
    STATS = 11
    STATS_REPLY = 12
    BYE = 13
    RELOAD = 14
    RELOADED = 15
    MODEL_CHANGED = 16
    OPEN = 17
    WITHDRAW = 18
    STAGE = 19
    STAGE_PLACES = 20
    STAGED = 21
    LOOKUP = 22
    LOOKUP_REPLY = 23
    PUT = 24
    PUT_REPLY = 25
    LEASES = 26
    LEASES_REPLY = 27
    RECALL = 28
    FETCH = 29
    FETCHED = 30

    START_RANK = 32
    RANK_READY = 33
    RUN = 34
    RAN = 35
    COPY = 36
    COPIED = 37
    START_DECODER = 38
    PROBE = 39
    PROBED = 40
    FILL = 41
    FILLED = 42
    DROP = 43
    START_FAILED = 44
    DECODER_READY = 45
    COMPARE = 46
    COMPARED = 47
    LOAD = 48
    LOADED = 49
    SWAP = 50
    UNLOAD = 51
    MAP_REGION = 52
    UNMAP_REGION = 53
    COPY_OUT = 54

    EVICT = 64
    EVICT_REPLY = 65


class Message(BaseModel):
    """A frame's header."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_bytes="base64", val_json_bytes="base64")


M = TypeVar("M", bound=BaseModel)


class Frame(NamedTuple):
    """One received frame. Whoever handles it owns its descriptors."""

    kind: int
    header: bytes
    body: bytes
    fds: list[int]


@dataclass(slots=True)
class OutgoingFrame:
    """One frame to send: its bytes, and descriptors that are closed once they are sent if `owned`."""

    data: bytes
    fds: Sequence[int] = ()
    owned: bool = False

    def discard(self) -> None:
        """It was sent, or never will be: close the descriptors that are its own. Twice is harmless."""
        if self.owned:
            self.owned = False
            close_all(self.fds)


def pack_frame(
    kind: Kind, message: Message | None, body: bytes = b"", fds: Sequence[int] = (), *, owned: bool = False
) -> OutgoingFrame:
    """Serialise one frame. Defaults are left out of the header; without a message it is empty."""
    header = message.__pydantic_serializer__.to_json(message, exclude_defaults=True) if message is not None else b""
    if len(header) > MAX_HEADER_BYTES or len(body) > MAX_BODY_BYTES or len(fds) > MAX_DESCRIPTORS:
        raise ProtocolError(f"{kind.name} frame too large: {len(header)} + {len(body)} bytes, {len(fds)} descriptors")
    prefix = PREFIX.pack(MAGIC, kind, len(fds), 0, len(header), len(body))
    return OutgoingFrame(b"".join((prefix, header, body)), fds, owned)


def joined(frames: Iterable[OutgoingFrame]) -> Iterator[OutgoingFrame]:
    """The same frames, in order, as few as their receiver can take at once: each one is sent by one call.

    Descriptors have to be their frames' own.
    """
    together: list[OutgoingFrame] = []
    num_bytes = num_fds = 0
    for frame in frames:
        num_bytes += len(frame.data)
        num_fds += len(frame.fds)
        if together and (num_bytes > MAX_JOINED_BYTES or num_fds > MAX_DESCRIPTORS):
            yield _joined(together)
            together, num_bytes, num_fds = [], len(frame.data), len(frame.fds)
        together.append(frame)
    if together:
        yield _joined(together)


def _joined(frames: list[OutgoingFrame]) -> OutgoingFrame:
    if len(frames) == 1:
        return frames[0]
    fds = [fd for frame in frames for fd in frame.fds]
    return OutgoingFrame(b"".join(frame.data for frame in frames), fds, owned=bool(fds))


def parse(model: type[M], frame: Frame) -> M:
    """Validate a frame's header.

    Raises:
        ProtocolError: it is not a valid `model`; names the field and the rule.
    """
    try:
        parsed: M = model.__pydantic_validator__.validate_json(frame.header)
        return parsed
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "header"
        raise ProtocolError(f"bad {model.__name__} frame: {where}: {first['msg']}") from None


class FrameReader:
    """Cuts a byte stream with descriptors into frames.

    Holds the descriptors of frames that are not complete yet; `close()` closes them.
    """

    __slots__ = ("_buffer", "_fds")

    def __init__(self) -> None:
        self._buffer = b""
        self._fds: deque[int] = deque()

    def feed(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Take what one read of the socket returned.

        Raises:
            ProtocolError: more descriptors wait than two frames may have.
        """
        self._buffer = self._buffer + data if self._buffer else data
        if fds:
            self._fds.extend(fds)
            if len(self._fds) > 2 * MAX_DESCRIPTORS:  # with the end of one frame comes the beginning of the next
                raise ProtocolError(f"{len(self._fds)} descriptors wait for their frames")

    def next_frame(self) -> Frame | None:
        """The next complete frame, or None.

        Raises:
            ProtocolError: not a frame, a length beyond its bound, or descriptors that no frame counts.
        """
        buffer = self._buffer
        if len(buffer) < PREFIX.size:
            return None
        magic, kind, num_fds, reserved, header_bytes, body_bytes = PREFIX.unpack_from(buffer)
        if magic != MAGIC or reserved:
            raise ProtocolError("not an mmcache frame")
        if header_bytes > MAX_HEADER_BYTES or body_bytes > MAX_BODY_BYTES or num_fds > MAX_DESCRIPTORS:
            raise ProtocolError(f"frame beyond its bounds: {header_bytes} + {body_bytes} bytes, {num_fds} descriptors")
        start = PREFIX.size + header_bytes
        end = start + body_bytes
        if len(buffer) < end:
            return None
        if num_fds > len(self._fds):
            raise ProtocolError(f"frame counts {num_fds} descriptors, {len(self._fds)} came")
        fds = [self._fds.popleft() for _ in range(num_fds)] if num_fds else []
        self._buffer = buffer[end:]
        if not self._buffer and self._fds:
            close_all(fds)
            raise ProtocolError(f"{len(self._fds)} descriptors came that no frame counts")
        return Frame(kind, buffer[PREFIX.size : start], buffer[start:end], fds)

    @property
    def has_frame(self) -> bool:
        """Whether what came has a complete frame, or something that is none."""
        buffer = self._buffer
        if len(buffer) < PREFIX.size:
            return False
        *_, header_bytes, body_bytes = PREFIX.unpack_from(buffer)
        end: int = PREFIX.size + header_bytes + body_bytes
        return len(buffer) >= end

    def close(self) -> None:
        """Close the descriptors of frames that never completed."""
        close_all(self._fds)
        self._fds.clear()
        self._buffer = b""


def close_all(fds: Sequence[int] | deque[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)
