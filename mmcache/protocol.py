"""What a client and the sidecar say to each other. docs/protocol.md tells the conversation, framing.py how it goes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from mmcache.framing import Message
from mmcache.records import MAX_CONSUMERS, MAX_ITEMS, SUPPLY_WINDOW

PROTOCOL_VERSION = 4
MAX_STAGED = 64
"""Slices that one STAGE asks room for."""

MAX_RETRY_S = 3600.0

Uint16 = Annotated[int, Field(ge=0, lt=1 << 16)]
Uint32 = Annotated[int, Field(ge=0, lt=1 << 32)]
Uint64 = Annotated[int, Field(ge=0, lt=1 << 64)]
Position = Annotated[int, Field(ge=0, lt=MAX_ITEMS)]
Positions = Annotated[list[Position], Field(max_length=MAX_ITEMS)]


class Foreign(Message):
    """The model that all of a connection is of, if that is not the served one."""

    fingerprint: Annotated[bytes, Field(min_length=16, max_length=16)]
    dtype: Literal["float32", "bfloat16", "float16"]


class Hello(Message):
    """The client's first frame; carries a pidfd that the client opened on itself."""

    protocol: int
    version: Annotated[str, Field(max_length=64)] = ""
    name: Annotated[str, Field(max_length=128)] = ""
    namespace: Annotated[str, Field(max_length=256)] = ""
    foreign: Foreign | None = None


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
    max_pixels: int
    orientation: str
    processor: str
    """Canonical JSON of the preprocessing settings, from which sizes follow."""
    foreign: str = ""
    """Fingerprint of the model that the client announced; without one the sidecar knows no such."""


class Refused(Message):
    """The sidecar will not talk; it closes after this."""

    error: str
    reason: str
    protocol: int = PROTOCOL_VERSION


class PoolAdded(Message):
    """A pool's memory; carries its descriptor. Sent before the first grant that names it.

    `device`: UUID of the device that it is on; empty for host memory.
    """

    pool_id: Uint32
    nbytes: Uint64
    device: str = ""


class PoolGone(Message):
    """No further grant will name this pool; leases on it stay readable."""

    pool_id: Uint32


class Unsettled(Message):
    """The header of a `RESULTS` frame that has more than grants.

    `need`: positions whose bytes are asked for. `verify`: positions that have their grant, whose bytes are asked for to
    check it; a client may leave them out. `offered`: positions whose grant has shares for others, and their tokens.
    `retry_after_s`: when there should be room for those that failed with `Overloaded`.
    """

    need: Positions = []
    offered: Positions = []
    tokens: Annotated[list[Uint64], Field(max_length=MAX_ITEMS)] = []
    verify: Positions = []
    failed: Positions = []
    errors: Annotated[list[str], Field(max_length=MAX_ITEMS)] = []
    reasons: Annotated[list[str], Field(max_length=MAX_ITEMS)] = []
    retry_after_s: Annotated[float, Field(ge=0, le=MAX_RETRY_S, allow_inf_nan=False)] = 0.0


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

    ask_id: Uint32
    model: Annotated[str, Field(max_length=4096)] = ""
    folder: Annotated[str, Field(max_length=4096)] = ""


class Reloaded(Message):
    """The model is served, or the error why all is as before."""

    ask_id: Uint32
    error: str = ""
    reason: str = ""


class ModelChanged(Message):
    """What `Welcome` said of the model is over: grants in the frames after this one are of the new one."""

    fingerprint: str
    model: str
    dtype: str
    dim: int
    processor: str


class StatsRequest(Message):
    """Ask for the counters."""

    ask_id: Uint32


class StatsReply(Message):
    """Body: the counters, JSON."""

    ask_id: Uint32


class LeasesRequest(Message):
    """Ask who holds what.

    `limit`: leases listed at most, the oldest first. `pid`: list only what this process holds; all is counted.
    `check`: look for broken books too.
    """

    ask_id: Uint32
    limit: Annotated[int, Field(ge=0, le=10_000)] = 1000
    pid: int | None = None
    check: bool = False


class LeasesReply(Message):
    """Body: JSON; or the error why there is none."""

    ask_id: Uint32
    error: str = ""
    reason: str = ""


class LookupReply(Message):
    """The header of a `LOOKUP_REPLY` that has no codes: the error why not."""

    error: str
    reason: str


class Recall(Message):
    """The sidecar takes back grants of a call that waits for room, because an earlier one needs theirs.

    The client acknowledges them; the positions are open again and will be settled anew.
    """

    request_id: Uint32
    positions: Positions


class Fetch(Message):
    """Ask for a copy of what a lease is on, for who cannot map its memory. The lease goes on."""

    ask_id: Uint32
    timeout_ms: Uint32
    slot: Uint32
    generation: Uint32


class Fetched(Message):
    """Carries a sealed memfd that begins with the bytes, or says why there is none."""

    ask_id: Uint32
    error: str = ""
    reason: str = ""


class Withdraw(Message):
    """End the unclaimed shares of offers, and staged slices, of this connection. Body: tokens. No reply."""


class Stage(Message):
    """Ask for room for pixels in this client's staging region, made at its first use. Body: keys. Columns."""

    ask_id: Uint32
    timeout_ms: Uint32
    consumers: Annotated[int, Field(ge=1, le=MAX_CONSUMERS)] = 1
    kinds: Annotated[list[Annotated[str, Field(max_length=16)]], Field(max_length=MAX_STAGED)]
    headers: Annotated[list[Annotated[bytes, Field(max_length=4096)]], Field(max_length=MAX_STAGED)]
    sizes: Annotated[list[Uint64], Field(max_length=MAX_STAGED)]


class StagePlaces(Message):
    """Where to write them, or why not; columns. The first carries the region's descriptor.

    `errors`: empty where there is a place.
    """

    ask_id: Uint32
    tokens: list[Uint64] = []
    offsets: list[Uint64] = []
    errors: list[str] = []
    reasons: list[str] = []


class Staged(Message):
    """The pixels are in place. Body: tokens; with `has_keys` the key behind each that had none in its STAGE. No reply.

    Pixels that come from a device are hashed where they were put, so that they are copied once.
    """

    has_keys: bool = False


class Put(Message):
    """An embedding made elsewhere, in a sealed memfd that travels along, for a key of this connection's namespace.

    `dim`: its width, of a foreign model.
    """

    ask_id: Uint32
    timeout_ms: Uint32
    fingerprint: Annotated[bytes, Field(min_length=16, max_length=16)]
    key: Annotated[bytes, Field(min_length=16, max_length=16)]
    num_tokens: Annotated[int, Field(ge=1, lt=1 << 32)]
    grid: tuple[Uint16, Uint16, Uint16]
    cost_seconds: Annotated[float, Field(ge=0, le=3600)] = 0.0
    dim: Annotated[int, Field(ge=0, lt=1 << 20)] = 0


class PutReply(Message):
    """It is cached (`is_new`), was cached already, or the error why not."""

    ask_id: Uint32
    is_new: bool = False
    error: str = ""
    reason: str = ""
