"""What a client and the sidecar say to each other. docs/protocol.md tells the conversation, framing.py how it goes."""

from __future__ import annotations

import struct
from typing import Annotated, NamedTuple

from pydantic import BaseModel, Field

from mmcache.errors import ProtocolError
from mmcache.framing import Frame, Message

PROTOCOL_VERSION = 1
KEY_BYTES = 16
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
