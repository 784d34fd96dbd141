"""The questions that a client asks besides encode: each is a frame to send and how its answer is read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from ipc.memory_shm import sealed_copy
from mmcache.core import ClientCore, milliseconds
from mmcache.errors import ITEM_ERRORS, CheckpointError, ConfigError, ItemError, ProtocolError, SidecarError
from mmcache.framing import Frame, Kind, parse
from mmcache.keys import ContentKey, Fingerprint
from mmcache.pending import Ask, frame_of
from mmcache.protocol import LeasesRequest, Put, PutReply, Reload, Reloaded, StatsRequest
from mmcache.records import LOOKUP_HEAD, MAX_ITEMS, ORIGINS

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")


class Question(Generic[T]):
    """Asked once it exists. `read` turns the answer into what the caller gets, or raises."""

    def __init__(self, ask: Ask, read: Callable[[Frame], T]) -> None:
        self.ask = ask
        self._read = read

    def result(self) -> T:
        """What the answer says."""
        return self._read(frame_of(self.ask))


Start: TypeAlias = Callable[[ClientCore, float], Question[T]]
"""Asks, given the core and the seconds that are left."""


def stats(core: ClientCore) -> Question[dict[str, Any]]:
    """The sidecar's counters."""
    ask = Ask(core.new_id())
    core.ask(Kind.STATS, ask, StatsRequest(ask_id=ask.ask_id))
    return Question(ask, _json)


def leases(core: ClientCore, limit: int, check: bool) -> Question[dict[str, Any]]:
    """Who holds what."""
    ask = Ask(core.new_id())
    core.ask(Kind.LEASES, ask, LeasesRequest(ask_id=ask.ask_id, limit=limit, check=check))
    return Question(ask, _json)


def reload(core: ClientCore, model: str | os.PathLike[str] | None) -> Question[Fingerprint]:
    """New weights."""
    name = os.fspath(model) if model is not None else ""
    folder = os.path.abspath(os.path.expanduser(name)) if name else ""
    ask = Ask(core.new_id())
    core.ask(Kind.RELOAD, ask, Reload(ask_id=ask.ask_id, model=name, folder=folder))

    def read(frame: Frame) -> Fingerprint:
        reply = parse(Reloaded, frame)
        if reply.error:
            kinds = {"ConfigError": ConfigError, "CheckpointError": CheckpointError}
            raise kinds.get(reply.error, SidecarError)(reply.reason)
        return Fingerprint.from_hex(core.served.fingerprint)

    return Question(ask, read)


def lookup(keys: Sequence[ContentKey], core: ClientCore, _: float) -> Question[list[str | None]]:
    """Where embeddings are; up to 1,024 keys."""
    assert 1 <= len(keys) <= MAX_ITEMS, "the caller cuts"
    ask = Ask(core.new_id())
    core.ask(Kind.LOOKUP, ask, None, b"".join((LOOKUP_HEAD.pack(ask.ask_id), *keys)))

    def read(frame: Frame) -> list[str | None]:
        codes = frame.body[LOOKUP_HEAD.size :]
        if len(codes) != len(keys) or any(code > len(ORIGINS) for code in codes):
            raise ProtocolError("a LOOKUP_REPLY does not fit its question")
        return [ORIGINS[code - 1] if code else None for code in codes]

    return Question(ask, read)


def put(
    core: ClientCore,
    key: ContentKey,
    embedding: np.ndarray[Any, Any],
    grid: tuple[int, int, int],
    cost_seconds: float,
    timeout_s: float,
) -> Question[bool]:
    """An embedding made elsewhere: its bytes, `[num_tokens, row_bytes]`, of the model that is served."""
    fd, _ = sealed_copy("mmcache-put", [embedding.data])
    ask = Ask(core.new_id())
    message = Put(
        ask_id=ask.ask_id, timeout_ms=milliseconds(timeout_s), fingerprint=bytes.fromhex(core.served.fingerprint),
        key=bytes(key), num_tokens=len(embedding), grid=grid, cost_seconds=cost_seconds,
    )  # fmt: skip
    core.ask(Kind.PUT, ask, message, fds=[fd])

    def read(frame: Frame) -> bool:
        reply = parse(PutReply, frame)
        if reply.error:
            raise ITEM_ERRORS.get(reply.error, ItemError)(reply.reason, source=str(key)[:12])
        return reply.is_new

    return Question(ask, read)


def _json(frame: Frame) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(frame.body or b"{}")
    return found
