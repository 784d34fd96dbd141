"""Embeddings made elsewhere: checked against the model that is served, guarded as encoded ones are, and cached."""

from __future__ import annotations

import asyncio
import mmap
import os
from typing import TYPE_CHECKING

from encoder.sizing import num_patches, num_tokens
from ipc.errors import MemorySealError
from ipc.leases import Holder
from ipc.memory_shm import SEALS_FROZEN, check_sealed, round_up
from mmcache.errors import EncodeFailed, ItemError, NonFiniteEmbedding, ProtocolError, TooManyRequests, WrongEmbedding
from mmcache.foreign import VALUE_BYTES, ForeignModel
from mmcache.framing import Frame, Kind, pack_frame, parse
from mmcache.protocol import Put, PutReply
from mmcache.server.batcher import RankLostError
from mmcache.server.decoders import SharedDescriptor
from mmcache.server.facts import ModelFacts
from mmcache.server.flight import AbandonedError, Flight
from mmcache.server.grids import grid_fault
from mmcache.server.placing import GaveWayError
from mmcache.server.retries import MAX_TRIES
from mmcache.transport import take_descriptors

if TYPE_CHECKING:
    from ipc.pool import Extent
    from mmcache.server.connection import Connection
    from mmcache.server.rank import Rank


FOREIGN_MERGE = 4
"""Patches that became one token of an embedding that was made elsewhere: what is guessed where nobody says its cost."""


def on_put(connection: Connection, holder: Holder, frame: Frame) -> None:
    """Begin a PUT, or refuse it at once.

    Raises:
        ProtocolError: its memory is not sealed, or not of the size that it says.
    """
    (fd,) = take_descriptors(frame, 1)
    memory = SharedDescriptor(fd)
    try:
        message = parse(Put, frame)
        try:
            connection.admit_question()
            check_put(message, fd, connection.coordinator.facts, connection.foreign)
        except (TooManyRequests, WrongEmbedding) as error:
            _reply(connection, message, error=error)
        else:
            put = _PutCall(connection, holder, message, memory)
            connection.coordinator.background.spawn(connection, put.carry(), put.fail)
            memory.share()
    finally:
        memory.release()


def check_put(put: Put, fd: int, facts: ModelFacts, foreign: ForeignModel | None) -> None:
    """Check a PUT against the memory behind `fd` and against the model of its connection.

    Raises:
        ProtocolError: the memory is not sealed, or its size is not that of so many tokens.
        WrongEmbedding: another model is served, or it has no item of that grid and so many tokens.
    """
    try:
        nbytes = check_sealed(fd, SEALS_FROZEN)
    except MemorySealError as error:
        raise ProtocolError(f"PUT: {error}") from error
    model = foreign or facts
    if put.fingerprint != model.fingerprint:
        whose = "this client's" if foreign is not None else "served"
        raise WrongEmbedding(f"it is of fingerprint {put.fingerprint.hex()}, and {model.fingerprint} is {whose}")
    if foreign is None:
        _check_grid(put, facts)
    elif not put.dim or min(put.grid) < 1:
        raise WrongEmbedding(f"width {put.dim} and grid {put.grid} must be positive")
    num_bytes = put.num_tokens * _token_bytes(put, facts, foreign)
    if nbytes != (size := round_up(num_bytes, mmap.PAGESIZE)):
        raise ProtocolError(f"PUT: {put.num_tokens} tokens are {size} bytes of whole pages, its memory has {nbytes}")


def _token_bytes(put: Put, facts: ModelFacts, foreign: ForeignModel | None) -> int:
    return facts.token_bytes if foreign is None else put.dim * VALUE_BYTES[foreign.dtype]


def _check_grid(put: Put, facts: ModelFacts) -> None:
    (t, h, w), processor = put.grid, facts.processor
    if fault := grid_fault(put.grid, processor):
        raise WrongEmbedding(f"this model has no item of grid {t}×{h}×{w}: {fault}")
    if put.num_tokens != (expected := num_tokens(put.grid, processor.merge_size)):
        raise WrongEmbedding(f"grid {t}×{h}×{w} has {expected} tokens, got {put.num_tokens}")


class _PutCall:
    """One embedding on its way into a pool. It queues for room like an item of a call, and is given up like one."""

    def __init__(self, connection: Connection, holder: Holder, put: Put, memory: SharedDescriptor) -> None:
        self._connection = connection
        self._home = connection.coordinator
        self._put = put
        self._memory = memory
        self._foreign = foreign = connection.foreign
        self._key = put.key if foreign is None else foreign.key(put.key)
        self._nbytes = put.num_tokens * _token_bytes(put, self._home.facts, foreign)
        self._num_patches = num_patches(put.grid) if foreign is None else FOREIGN_MERGE * put.num_tokens
        self._flight = Flight(self._key, connection.namespace_id, foreign)
        self._request = connection.calls.stand_in(connection, holder, put.ask_id, self._flight)
        self._timer = asyncio.get_running_loop().call_later(put.timeout_ms / 1000, self._expire)
        self._is_answered = False

    async def carry(self) -> None:
        """Cache it, and answer."""
        try:
            self._answer(is_new=await self._cache())
        except ItemError as error:
            self.fail(error)
        except AbandonedError:  # answered at its deadline, or its client has left
            pass
        finally:
            self._timer.cancel()
            self._memory.release()
            self._request.cancel([])

    def fail(self, error: Exception) -> None:
        """Answer why it is not cached."""
        self._answer(error=error if isinstance(error, ItemError) else EncodeFailed(f"internal error: {error!r}"))

    def _expire(self) -> None:
        self.fail(self._connection.late_errors()(self._flight))
        self._request.cancel([])

    def _answer(self, *, is_new: bool = False, error: ItemError | None = None) -> None:
        if not self._is_answered:
            self._is_answered = True
            _reply(self._connection, self._put, is_new=is_new, error=error)

    async def _cache(self) -> bool:
        num_tries = 0
        while num_tries < MAX_TRIES:
            if self._home.pools.get(self._key) is not None:
                return False
            try:
                rank, extent = await self._copied()
            except GaveWayError:
                await self._home.misses.placing.turn(self._flight)
                continue
            except RankLostError:
                num_tries += 1
                continue
            if not extent.is_lost:  # else it died right after its answer
                return self._publish(rank, extent)
            num_tries += 1
        raise EncodeFailed("the ranks died while it was copied into their pools")

    async def _copied(self) -> tuple[Rank, Extent]:
        """Bring it through the ingest region into a pool, and guard it there. Waits for room."""
        ingest, flight, placing = self._home.ingest, self._flight, self._home.misses.placing
        flight.stage = "waiting for room in the ingest region"
        placing.filling.add(flight)
        try:
            with flight.interrupted():
                part = await ingest.reserve(self._nbytes)
        finally:
            placing.filling.discard(flight)
        try:
            self._check_model()
            await asyncio.to_thread(_read, self._memory.fd, ingest.memory(part))
            rank, extent = await placing.place(flight, self._nbytes, self._num_patches, may_give_way=True)
            flight.stage = "copied into the pool"
            is_finite = await rank.copy(part.offset, extent, guard=(self._foreign or self._home.facts).dtype)
        finally:
            ingest.free(part)
        if not is_finite:
            rank.pool.abandon(extent)
            raise NonFiniteEmbedding("it has NaN or Inf; nothing was cached")
        return rank, extent

    def _publish(self, rank: Rank, extent: Extent) -> bool:
        """False if the key has an embedding by now."""
        put = self._put
        try:
            self._check_model()
        except WrongEmbedding:
            rank.pool.abandon(extent)
            raise
        seconds = put.cost_seconds or rank.cost.item_seconds(self._num_patches)
        if not self._home.pools.cache(self._flight, rank, extent, seconds, (put.num_tokens, *put.grid)):
            return False
        self._home.stats.put += 1
        self._home.misses.behind.write(rank, extent, (put.num_tokens, *put.grid))
        return True

    def _check_model(self) -> None:
        if self._foreign is None and self._put.fingerprint != (served := self._home.fingerprint):
            raise WrongEmbedding(f"the model changed meanwhile: {served} is served")


def _reply(connection: Connection, put: Put, *, is_new: bool = False, error: ItemError | None = None) -> None:
    kind, reason = (type(error).__name__, error.reason[:2000]) if error is not None else ("", "")
    if kind:
        connection.count_error(kind)
    connection.send(pack_frame(Kind.PUT_REPLY, PutReply(ask_id=put.ask_id, is_new=is_new, error=kind, reason=reason)))


def _read(fd: int, into: memoryview) -> None:
    """Copy the start of a file, in a thread."""
    done = 0
    while done < into.nbytes:
        count = os.preadv(fd, [into[done:]], done)
        assert count, "the memory is sealed, and was as large as this"
        done += count
