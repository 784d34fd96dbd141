"""The questions that a client asks besides encode: each is a frame to send and how its answer is read."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, Self, TypeAlias, TypeVar

import numpy as np
from pydantic import ValidationError

from ipc.memory_shm import SEALS_FROZEN, ReadOnlyRegion, sealed_copy
from mmcache.array_checks import checked_grid
from mmcache.core import ClientCore
from mmcache.encode_call import sidecar_time_s
from mmcache.errors import (
    ITEM_ERRORS,
    CheckpointError,
    ConfigError,
    ItemError,
    LeaseReleased,
    MMCacheError,
    ProtocolError,
    SidecarError,
    WrongEmbedding,
)
from mmcache.framing import Frame, Kind, close_all, parse
from mmcache.keys import ContentKey, Fingerprint
from mmcache.pending import Ask, frame_of
from mmcache.protocol import (
    Fetch,
    Fetched,
    LeasesReply,
    LeasesRequest,
    LookupReply,
    Put,
    PutReply,
    Reload,
    Reloaded,
    StatsRequest,
)
from mmcache.records import LOOKUP_HEAD, MAX_ITEMS, ORIGINS, milliseconds
from mmcache.transport import take_descriptors

if TYPE_CHECKING:
    import torch

    from mmcache.lease import Lease, Served

MAX_MODEL_CHARS = 4096

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


def leases(core: ClientCore, limit: int, pid: int | None, check: bool) -> Question[dict[str, Any]]:
    """Who holds what."""
    ask = Ask(core.new_id())
    core.ask(Kind.LEASES, ask, LeasesRequest(ask_id=ask.ask_id, limit=limit, pid=pid, check=check))

    def read(frame: Frame) -> dict[str, Any]:
        reply = parse(LeasesReply, frame)
        if reply.error:
            _raise(reply)
        return _json(frame)

    return Question(ask, read)


def reload(core: ClientCore, model: str | os.PathLike[str] | None) -> Question[Fingerprint]:
    """New weights. Raises `ConfigError` for what no model can be called."""
    name, folder = ("", "") if model is None else _model_names(model)
    ask = Ask(core.new_id())
    core.ask(Kind.RELOAD, ask, Reload(ask_id=ask.ask_id, model=name, folder=folder))

    def read(frame: Frame) -> Fingerprint:
        reply = parse(Reloaded, frame)
        if reply.error:
            kinds = {"ConfigError": ConfigError, "CheckpointError": CheckpointError}
            raise kinds.get(reply.error, SidecarError)(reply.reason)
        return Fingerprint.from_hex(core.served.fingerprint)

    return Question(ask, read)


def _model_names(model: str | os.PathLike[str]) -> tuple[str, str]:
    """A model as it is called, and as an absolute path: the sidecar runs in another folder."""
    name = os.fsdecode(model)
    if not name:
        raise ConfigError("model = '': must be a preset's name or a folder")
    try:
        folder = os.path.abspath(os.path.expanduser(name))
        name.encode()
        folder.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"model = {name!a}: must be UTF-8, with the current folder before it") from None
    except OSError as error:
        raise ConfigError(f"model = {name}: the current folder cannot be found: {error.strerror}") from None
    if len(folder) > MAX_MODEL_CHARS or len(name) > MAX_MODEL_CHARS:
        raise ConfigError(
            f"model = {name[:100]}...: {max(len(folder), len(name))} characters as an absolute path, at most "
            f"{MAX_MODEL_CHARS}"
        )
    return name, folder


def lookup(keys: Sequence[ContentKey], core: ClientCore, _: float) -> Question[list[str | None]]:
    """Where embeddings are; up to 1,024 keys."""
    assert 1 <= len(keys) <= MAX_ITEMS, "the caller cuts"
    ask = Ask(core.new_id())
    core.ask(Kind.LOOKUP, ask, None, b"".join((LOOKUP_HEAD.pack(ask.ask_id), *keys)))

    def read(frame: Frame) -> list[str | None]:
        if frame.header:
            _raise(parse(LookupReply, frame))
        codes = frame.body[LOOKUP_HEAD.size :]
        if len(codes) != len(keys) or any(code > len(ORIGINS) for code in codes):
            raise ProtocolError("a LOOKUP_REPLY does not fit its question")
        return [ORIGINS[code - 1] if code else None for code in codes]

    return Question(ask, read)


class PutItem(NamedTuple):
    """An embedding to put, in a sealed memfd. `close` it unless it was handed to `put`."""

    key: ContentKey
    served: Served
    num_tokens: int
    dim: int
    fd: int

    @classmethod
    def of(cls, key: ContentKey, embedding: np.ndarray[Any, Any] | torch.Tensor, served: Served) -> Self:
        """Copy an embedding. Raises `WrongEmbedding` unless it fits the model `served`."""
        rows = checked_embedding(embedding, served)
        fd, _ = sealed_copy("mmcache-put", [rows.data])
        return cls(key, served, len(rows), embedding.shape[1], fd)

    def close(self) -> None:
        """It will not be put."""
        os.close(self.fd)


def put(core: ClientCore, item: PutItem, grid: Sequence[int], cost_seconds: float, timeout_s: float) -> Question[bool]:
    """An embedding made elsewhere. `item` is used up, also when this raises."""
    ask = Ask(core.new_id())
    try:
        grid = checked_grid(grid)
        message = Put(
            ask_id=ask.ask_id, timeout_ms=milliseconds(sidecar_time_s(timeout_s)),
            fingerprint=bytes.fromhex(item.served.fingerprint), key=bytes(item.key), num_tokens=item.num_tokens,
            grid=grid, cost_seconds=cost_seconds, dim=0 if item.served.dim else item.dim,
        )  # fmt: skip
    except ValidationError as error:
        item.close()
        first = error.errors(include_url=False)[0]
        raise WrongEmbedding(f"{first['loc'][0]} is {first['input']!r}: {first['msg']}") from None
    except ValueError as error:
        item.close()
        raise WrongEmbedding(str(error)) from None
    core.ask(Kind.PUT, ask, message, fds=[item.fd])

    def read(frame: Frame) -> bool:
        reply = parse(PutReply, frame)
        if reply.error:
            raise ITEM_ERRORS.get(reply.error, ItemError)(reply.reason, source=str(item.key)[:12])
        return reply.is_new

    return Question(ask, read)


def fetch(lease: Lease, core: ClientCore, timeout_s: float) -> Question[torch.Tensor]:
    """A copy of an embedding in memory of this process's own. Raises `LeaseReleased` and what its memory raises."""
    slot, generation = lease.word(core)
    num_tokens, dim, dtype, nbytes = lease.num_tokens, lease.dim, lease.dtype, lease.nbytes
    ask = Ask(core.new_id(), undo=lambda frame: close_all(frame.fds))
    timeout_ms = milliseconds(sidecar_time_s(timeout_s))
    core.ask(Kind.FETCH, ask, Fetch(ask_id=ask.ask_id, timeout_ms=timeout_ms, slot=slot, generation=generation))

    def read(frame: Frame) -> torch.Tensor:
        import torch

        reply = parse(Fetched, frame)
        if reply.error:
            close_all(frame.fds)
            kinds: dict[str, type[MMCacheError]] = {LeaseReleased.__name__: LeaseReleased, **ITEM_ERRORS}
            raise kinds.get(reply.error, SidecarError)(reply.reason)
        (fd,) = take_descriptors(frame, 1)
        try:
            view = ReadOnlyRegion.attach(fd, SEALS_FROZEN).view(0, nbytes, writable_flag=True)
        finally:
            os.close(fd)
        core.num_fetched += 1
        flat = torch.from_numpy(view).clone()
        return flat.view(getattr(torch, dtype)).view(num_tokens, dim)

    return Question(ask, read)


def _raise(reply: LeasesReply | LookupReply) -> NoReturn:
    raise ITEM_ERRORS.get(reply.error, ItemError)(reply.reason)


def _json(frame: Frame) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(frame.body or b"{}")
    return found


def checked_embedding(embedding: Any, served: Served) -> np.ndarray[Any, Any]:
    """An embedding's bytes, `[num_tokens, row_bytes]`, contiguous.

    Raises:
        WrongEmbedding: it is not `[num_tokens, dim]` of the model's dtype, or not on the CPU.
    """
    dtype = str(getattr(embedding, "dtype", type(embedding).__name__)).removeprefix("torch.")
    shape = tuple(getattr(embedding, "shape", ()))
    is_wide = len(shape) == 2 and shape[0] and (shape[1] == served.dim if served.dim else shape[1])
    if not is_wide or dtype != served.dtype:
        raise WrongEmbedding(
            f"an embedding must be {served.dtype} [num_tokens, {served.dim or 'dim'}], got {dtype} {list(shape)}"
        )
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(embedding, torch.Tensor):
        if embedding.device.type != "cpu":
            raise WrongEmbedding(f"it is on {embedding.device}; call .cpu() first")
        embedding = embedding.detach().contiguous().view(torch.uint8).numpy()
    return np.ascontiguousarray(embedding).view(np.uint8)
