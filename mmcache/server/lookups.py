"""Where embeddings are: a question that grants nothing and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ipc.leases import Holder
from mmcache.errors import TooManyRequests
from mmcache.foreign import ForeignModel
from mmcache.framing import Frame, Kind, pack_frame
from mmcache.keys import ContentKey, store_key
from mmcache.protocol import LookupReply
from mmcache.records import LOOKUP_HEAD, ORIGINS, parse_lookup
from mmcache.server.facts import is_usable

if TYPE_CHECKING:
    from mmcache.server.connection import Connection
    from mmcache.server.coordinator import Coordinator

NOWHERE, POOL, STORE = 0, 1 + ORIGINS.index("pool"), 1 + ORIGINS.index("store")


def on_lookup(connection: Connection, _: Holder, frame: Frame) -> None:
    """Answer a LOOKUP: at once if the pools have every key, else when the store has been asked for the others.

    Raises:
        ProtocolError: it has no keys, too many, or not whole ones.
    """
    ask_id, keys = parse_lookup(frame)
    try:
        connection.admit_question()
    except TooManyRequests as error:
        refused = LookupReply(error=type(error).__name__, reason=error.reason)
        connection.send(pack_frame(Kind.LOOKUP_REPLY, refused, LOOKUP_HEAD.pack(ask_id)))
        return
    home, foreign = connection.coordinator, connection.foreign
    if foreign is not None:
        keys = list(map(foreign.key, keys))
    codes = bytearray(POOL if home.pools.get(key) is not None else NOWHERE for key in keys)
    reply = partial(_reply, connection, ask_id, codes)
    if NOWHERE not in codes:
        reply()
        return
    home.background.spawn(connection, ask_store(home, keys, codes, reply, foreign), lambda _: reply())


def _reply(connection: Connection, ask_id: int, codes: bytearray) -> None:
    connection.send(pack_frame(Kind.LOOKUP_REPLY, None, LOOKUP_HEAD.pack(ask_id) + codes))


async def ask_store(
    home: Coordinator, keys: Sequence[bytes], codes: bytearray, reply: Callable[[], None],
    foreign: ForeignModel | None = None,
) -> None:  # fmt: skip
    """Fill in where the keys are that have no place yet, then reply. What the store does not answer for has none."""
    model = foreign or home.facts
    places = [place for place, code in enumerate(codes) if code == NOWHERE]
    names = [store_key(model.fingerprint, ContentKey(keys[place])) for place in places]
    entries = await home.store.find(names)
    is_wrong = home.verifier.is_condemned
    for place, name, entry in zip(places, names, entries, strict=True):
        if home.pools.get(keys[place]) is not None:  # it came meanwhile
            codes[place] = POOL
        elif entry is not None and is_usable(entry, model) and not is_wrong(name):
            codes[place] = STORE
    reply()
