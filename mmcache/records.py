"""Fixed-size records in the bodies of frames: what is said so often that JSON would cost too much."""

from __future__ import annotations

import struct
from typing import NamedTuple

from mmcache.errors import ProtocolError
from mmcache.framing import Frame

KEY_BYTES = 16
MAX_ITEMS = 1024
MAX_REQUESTS = 1024
"""In flight on one connection."""
SUPPLY_WINDOW = 32
"""Items of one request whose bytes are asked for at once: bounds what a request of large files holds in memory."""
MAX_TIMEOUT_MS = (1 << 32) - 1
MAX_CONSUMERS = 1024
"""Shares that one lease may offer, and requests that may name one staged slice."""

ORIGINS = ("encoded", "pool", "host", "store")
"""Where an embedding came from, by the code in a grant record."""

PRIORITIES = ("interactive", "bulk")
"""Of a request, by the code in an `ENCODE`: somebody waits for it, or it is to be done beside what others wait for."""

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

ENCODE_HEAD = struct.Struct("<IIIIHBB")
"""Start of an `ENCODE` body, which has no header: request id, timeout in milliseconds, id of the call that it is a part
of, number of keys, consumers, 1 if more of the same call follows at once, and the code of its priority. Then keys of 16
bytes, then a `STAGED_ITEM` for each position whose pixels were staged."""

STAGED_ITEM = struct.Struct("<IQ")
"""Position, token of the slice."""

OPEN_HEAD = struct.Struct("<I")
"""Start of an `OPEN` body: request id, answered by `RESULTS`; then tokens, a position each."""

TOKEN = struct.Struct("<Q")
"""What a slice is called in a reference: of an offer of shares, or of a staged slice. Not to be guessed."""

STAGED_KEY = struct.Struct("<Q16s")
"""Token of a staged slice, and its key, where it was hashed only there."""

NO_KEY = bytes(KEY_BYTES)
"""In a `STAGE`, of what is not hashed yet."""

LOOKUP_HEAD = struct.Struct("<I")
"""Start of a `LOOKUP` body: ask id; then keys. Of its reply: ask id; then a byte a key: 0, or 1 + its origin's code."""

RESULTS_HEAD = struct.Struct("<I")
"""Start of a `RESULTS` body: request id; then grant records. The header is empty unless there is more to say."""


def milliseconds(seconds: float) -> int:
    """As frames carry a time."""
    return max(0, min(int(seconds * 1000), MAX_TIMEOUT_MS))


class EncodeFrame(NamedTuple):
    """What an `ENCODE` frame says. `staged`: tokens by position; `priority`: a code, see `PRIORITIES`."""

    request_id: int
    timeout_ms: int
    call_id: int
    consumers: int
    has_more: bool
    keys: bytes
    staged: dict[int, int]
    priority: int = 0


def parse_encode(frame: Frame) -> EncodeFrame:
    """Read an `ENCODE` frame.

    Raises:
        ProtocolError: no keys, too many, not whole ones, more consumers than may be, or no priority.
    """
    body = frame.body
    if len(body) < ENCODE_HEAD.size or frame.header:
        raise ProtocolError(f"ENCODE has {len(body)} bytes of body")
    request_id, timeout_ms, call_id, num_keys, consumers, has_more, priority = ENCODE_HEAD.unpack_from(body)
    end = ENCODE_HEAD.size + num_keys * KEY_BYTES
    rest = len(body) - end
    if not 1 <= num_keys <= MAX_ITEMS or rest < 0 or rest % STAGED_ITEM.size or consumers > MAX_CONSUMERS:
        raise ProtocolError(f"ENCODE has {len(body)} bytes of body: not 1 to {MAX_ITEMS} keys")
    if priority >= len(PRIORITIES):
        raise ProtocolError(f"ENCODE has a priority of code {priority}")
    staged = dict(STAGED_ITEM.iter_unpack(body[end:])) if rest else {}
    if any(position >= num_keys for position in staged):
        raise ProtocolError("ENCODE names a staged slice for a position that it does not have")
    keys = body[ENCODE_HEAD.size : end]
    return EncodeFrame(request_id, timeout_ms, call_id, consumers, bool(has_more), keys, staged, priority)


def parse_tokens(frame: Frame, start: int = 0) -> list[int]:
    """The tokens in a frame's body, from `start` on.

    Raises:
        ProtocolError: too many, or not whole ones.
    """
    num_tokens, rest = divmod(len(frame.body) - start, TOKEN.size)
    if rest or not 1 <= num_tokens <= MAX_ITEMS:
        raise ProtocolError(f"{len(frame.body)} bytes of body are not 1 to {MAX_ITEMS} tokens")
    return [token for (token,) in TOKEN.iter_unpack(frame.body[start:])]


def parse_staged(frame: Frame, has_keys: bool) -> list[tuple[int, bytes]]:
    """Tokens of a `STAGED`, each with its key, or `NO_KEY`.

    Raises:
        ProtocolError: too many, or not whole ones.
    """
    if not has_keys:
        return [(token, NO_KEY) for token in parse_tokens(frame)]
    num_tokens, rest = divmod(len(frame.body), STAGED_KEY.size)
    if rest or not 1 <= num_tokens <= MAX_ITEMS:
        raise ProtocolError(f"{len(frame.body)} bytes of body are not 1 to {MAX_ITEMS} tokens with their keys")
    return list(STAGED_KEY.iter_unpack(frame.body))


def parse_lookup(frame: Frame) -> tuple[int, list[bytes]]:
    """Ask id and keys of a `LOOKUP`.

    Raises:
        ProtocolError: no keys, too many, or not whole ones.
    """
    body = frame.body
    num_keys, rest = divmod(len(body) - LOOKUP_HEAD.size, KEY_BYTES)
    if rest or not 1 <= num_keys <= MAX_ITEMS or frame.header:
        raise ProtocolError(f"LOOKUP has {len(body)} bytes of body: not 1 to {MAX_ITEMS} keys")
    keys = struct.unpack_from(f"{KEY_BYTES}s" * num_keys, body, LOOKUP_HEAD.size)
    return LOOKUP_HEAD.unpack_from(body)[0], list(keys)


def parse_keys(frame: Frame) -> list[bytes]:
    """The keys that are a frame's body; it may have none.

    Raises:
        ProtocolError: too many, or not whole ones.
    """
    num_keys, rest = divmod(len(frame.body), KEY_BYTES)
    if rest or num_keys > MAX_ITEMS:
        raise ProtocolError(f"{len(frame.body)} bytes of body are not up to {MAX_ITEMS} keys")
    return list(struct.unpack(f"{KEY_BYTES}s" * num_keys, frame.body))
