"""What travels between a client and the sidecar, and between the sidecar and its own processes.

A frame is a 16-byte prefix (magic, kind, number of descriptors, header bytes, body bytes; little endian), a JSON
header that a pydantic model validates, and a binary body of fixed-size records. Descriptors travel beside the frame
that counts them. Every length is bounded before anything is allocated for it. docs/protocol.md tells the conversation.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mmcache.errors import ProtocolError

PROTOCOL_VERSION = 1
MAGIC = 0x434D
PREFIX = struct.Struct("<HHHHII")
KEY_BYTES = 16
MAX_HEADER_BYTES = 1 << 20
MAX_BODY_BYTES = 4 << 20
MAX_DESCRIPTORS = 16
MAX_ITEMS = 1024
SUPPLY_WINDOW = 32
"""Items of one request whose bytes are asked for at once: bounds what a request of large files holds in memory."""
MAX_TIMEOUT_MS = (1 << 32) - 1

ORIGINS = ("encoded", "pool", "host", "store")
"""Where an embedding came from, by the code in a grant record."""

GRANT = struct.Struct("<IIIHxxIIQQHHHxx")
"""A `Grant`."""

GRANT_HEAD = struct.Struct("<IIIHxx")
GRANT_EXTENT = struct.Struct("<IIQQHHHxx")
"""The two halves of a grant record; the second is packed once, when the extent is published."""


class Grant(NamedTuple):
    """A grant record: one position's share, where in which pool its extent lies, and what it is."""

    position: int
    slot: int
    generation: int
    origin: int
    pool_id: int
    num_tokens: int
    offset: int
    nbytes: int
    t: int
    h: int
    w: int


ACKNOWLEDGEMENT = struct.Struct("<II")
"""slot, generation."""

ENCODE_HEAD = struct.Struct("<II?xxx")
"""Start of an `ENCODE` body, which has no header: request id, timeout in milliseconds, whether more of the
same call follows at once; then keys of 16 bytes."""

RESULTS_HEAD = struct.Struct("<I")
"""Start of a `RESULTS` body: request id; then grant records. The header is empty unless there is more to say."""


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


class Message(BaseModel):
    """A frame's header."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_bytes="base64", val_json_bytes="base64")


M = TypeVar("M", bound=BaseModel)

Uint32 = Annotated[int, Field(ge=0, lt=1 << 32)]
Uint64 = Annotated[int, Field(ge=0, lt=1 << 64)]
Position = Annotated[int, Field(ge=0, lt=MAX_ITEMS)]
Positions = Annotated[list[Position], Field(max_length=MAX_ITEMS)]


class Hello(Message):
    """The client's first frame; carries a pidfd that the client opened on itself."""

    protocol: int
    version: Annotated[str, Field(max_length=64)] = ""
    name: Annotated[str, Field(max_length=128)] = ""
    namespace: Annotated[str, Field(max_length=256)] = ""


class AnyHello(BaseModel):
    """The one field of a HELLO that every protocol version has."""

    protocol: int


class Welcome(Message):
    """The answer; carries the connection's control memory. Pools follow as `POOL_ADDED`."""

    protocol: int
    version: str
    seed: Uint64
    fingerprint: str
    model: str
    dtype: str
    dim: int
    control_words: int
    max_item_bytes: int


class Refused(Message):
    """The sidecar will not talk; it closes after this."""

    error: str
    reason: str
    protocol: int = PROTOCOL_VERSION


class PoolAdded(Message):
    """A pool's memory; carries its descriptor. Sent before the first grant that names it."""

    pool_id: Uint32
    nbytes: Uint64


class PoolGone(Message):
    """No further grant will name this pool; leases on it stay readable."""

    pool_id: Uint32


class Unsettled(Message):
    """The header of a `RESULTS` frame that has more than grants.

    `need`: positions whose bytes are asked for. `verify`: positions that have their grant, whose bytes are asked for to
    check it; a client may leave them out.
    """

    need: Positions = []
    verify: Positions = []
    failed: Positions = []
    errors: Annotated[list[str], Field(max_length=MAX_ITEMS)] = []
    reasons: Annotated[list[str], Field(max_length=MAX_ITEMS)] = []


class Supply(Message):
    """Bytes of needed items, in a sealed memfd that travels along. Columns; `headers` describe the items (media.py)."""

    request_id: Uint32
    positions: Annotated[list[Position], Field(max_length=SUPPLY_WINDOW)]
    kinds: Annotated[list[Annotated[str, Field(max_length=16)]], Field(max_length=SUPPLY_WINDOW)]
    headers: Annotated[list[Annotated[bytes, Field(max_length=4096)]], Field(max_length=SUPPLY_WINDOW)]
    offsets: Annotated[list[Uint64], Field(max_length=SUPPLY_WINDOW)]
    sizes: Annotated[list[Uint64], Field(max_length=SUPPLY_WINDOW)]


class Cancel(Message):
    """The client no longer wants some positions of a request, or whatever is still open of it if none are named."""

    request_id: Uint32
    positions: Positions = []


class Acknowledge(Message):
    """Leases ended by message, where a store into the control memory would not be ordered. Body: records."""


class Bye(Message):
    """The client closes. Body: records of the shares it goes on holding; others have ended, those on their way too."""


class Reload(Message):
    """Load weights anew and serve them from then on; answered by `Reloaded`, after `ModelChanged` if it did change.

    `model`: a preset or a folder, empty for the model that is served; `folder`: the same as an absolute path.
    """

    reload_id: Uint32
    model: Annotated[str, Field(max_length=4096)] = ""
    folder: Annotated[str, Field(max_length=4096)] = ""


class Reloaded(Message):
    """The model is served, or the error why all is as before."""

    reload_id: Uint32
    error: str = ""
    reason: str = ""


class ModelChanged(Message):
    """What `Welcome` said of the model is over: grants in the frames after this one are of the new one."""

    fingerprint: str
    model: str
    dtype: str
    dim: int


class StatsRequest(Message):
    """Ask for the counters."""


class StatsReply(Message):
    """Body: the counters, JSON."""


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


def parse_encode(frame: Frame) -> tuple[int, int, bool, bytes]:
    """Request id, timeout in milliseconds, whether more follows, and keys of an `ENCODE` frame.

    Raises:
        ProtocolError: no keys, too many, or not whole ones.
    """
    num_items, rest = divmod(len(frame.body) - ENCODE_HEAD.size, KEY_BYTES)
    if rest or not 1 <= num_items <= MAX_ITEMS or frame.header:
        raise ProtocolError(f"ENCODE has {len(frame.body)} bytes of body: not 1 to {MAX_ITEMS} keys")
    request_id, timeout_ms, has_more = ENCODE_HEAD.unpack_from(frame.body)
    return request_id, timeout_ms, has_more, frame.body[ENCODE_HEAD.size :]


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
            ProtocolError: more descriptors wait than one frame may have.
        """
        self._buffer = self._buffer + data if self._buffer else data
        if fds:
            self._fds.extend(fds)
            if len(self._fds) > MAX_DESCRIPTORS:
                raise ProtocolError(f"{len(self._fds)} descriptors came for one frame")

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

    def close(self) -> None:
        """Close the descriptors of frames that never completed."""
        close_all(self._fds)
        self._fds.clear()
        self._buffer = b""


def close_all(fds: Sequence[int] | deque[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)
