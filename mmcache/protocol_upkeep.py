"""What operators and programs tell a sidecar to do with what it keeps."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mmcache.framing import Message
from mmcache.protocol import Uint32


class Evict(Message):
    """Remove what is cached and meant, or only count it; what several fields say holds together. Body: keys.

    Keys are of this connection's namespace. `fingerprint`: of a model, with keys the one that is served unless given.
    `stale`: of any other model than the one that is served. `everything`: nothing else is said.
    """

    ask_id: Uint32
    namespace: Annotated[str, Field(max_length=256)] | None = None
    fingerprint: Annotated[bytes, Field(min_length=16, max_length=16)] | None = None
    stale: bool = False
    everything: bool = False
    dry_run: bool = False


class EvictReply(Message):
    """Body: JSON, what there was; or the error why nothing was looked for."""

    ask_id: Uint32
    error: str = ""
    reason: str = ""
