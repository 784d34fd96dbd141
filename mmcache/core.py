"""A client's connection without its I/O: frames in, frames out. The faces of client.py and aio.py move them.

Threads: the faces call this one at a time; only `acknowledge`, `let_go` and `drop` may come from anywhere, at any time.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence

from ipc.memory_shm import SEALS_READERS, ReadOnlyRegion, SharedRegion
from mmcache.device_memory import DeviceMemory
from mmcache.device_staging import PageLock
from mmcache.errors import ITEM_ERRORS, ItemError, ProtocolError
from mmcache.foreign import ForeignModel
from mmcache.framing import Frame, Kind, Message, OutgoingFrame, close_all, pack_frame, parse
from mmcache.keys import KeyHasher
from mmcache.lease import Lease, Served
from mmcache.parts import Part
from mmcache.pending import ANSWERS, Ask, Pending, PendingEncode, PendingOpen
from mmcache.protocol import (
    Acknowledge,
    Bye,
    Cancel,
    ModelChanged,
    PoolAdded,
    PoolGone,
    Recall,
    Unsettled,
    Welcome,
    Withdraw,
)
from mmcache.records import (
    ACKNOWLEDGEMENT,
    ENCODE_HEAD,
    GRANT,
    MAX_ITEMS,
    MAX_REQUESTS,
    OPEN_HEAD,
    RESULTS_HEAD,
    STAGED_ITEM,
    TOKEN,
    milliseconds,
)
from mmcache.refs import SliceRef
from mmcache.shares import Shares
from mmcache.supplying import Supplying, supply_now
from mmcache.transport import take_descriptors


class ClientCore(Shares):
    """State of one connection after the handshake.

    Attributes:
        outbox: frames to send, in order.
        foreign: the model of this client, if not of the sidecar.
        served: the model that is served here, as far as was heard.
        staging: this client's region for pixels, once it has one; pages: their lock, if some come from a device.
        num_fetched: embeddings that were copied through the host.
        supply: what is done about bytes that are asked for: `prepare` in any thread, then `supplied`.
    """

    def __init__(
        self, welcome: Welcome, control_fd: int, namespace: str, ordinal: int | None = None,
        foreign: ForeignModel | None = None,
    ) -> None:  # fmt: skip
        """`ordinal`: the device on which this client reads; that of the pool unless given."""
        self.foreign = foreign
        self._ordinal = ordinal
        self.welcome = welcome
        self.hasher = KeyHasher(welcome.seed, namespace)
        super().__init__(control_fd)
        self.outbox: deque[OutgoingFrame] = deque()
        self._serve(welcome)
        self.staging: SharedRegion | None = None
        self.pages = PageLock()
        self.num_fetched = 0
        self.supply: Callable[[ClientCore, Supplying], None] = supply_now
        self._pools: dict[int, ReadOnlyRegion | DeviceMemory] = {}
        self._pending: dict[int, Pending] = {}
        self._asks: dict[int, Ask] = {}
        self._last_id = 0
        self._dropped: deque[Callable[[], None]] = deque()

    @property
    def device_counters(self) -> dict[str, int]:
        """As `Client.device_counters`."""
        unlocked_bytes = self.staging.nbytes if self.pages.has_failed and self.staging is not None else 0
        return {**self.in_streams.counters, "fetched": self.num_fetched, "unlocked_bytes": unlocked_bytes}

    @property
    def is_full(self) -> bool:
        """Whether as many requests and questions are in flight as may be."""
        room = MAX_REQUESTS - len(self._asks)
        if len(self._pending) < room:
            return False
        return sum(not pending.is_done for pending in list(self._pending.values())) >= room

    def new_id(self) -> int:
        """An id that nothing in flight has."""
        self._last_id = (self._last_id + 1) & 0xFFFFFFFF
        return self._last_id

    def encode(
        self, part: Part, timeout_s: float, call_id: int = 0, consumers: int = 0, priority: int = 0
    ) -> PendingEncode:
        """Start a request for the items of `part`."""
        pending = PendingEncode(self.new_id(), part)
        head = ENCODE_HEAD.pack(
            pending.request_id, milliseconds(timeout_s), call_id, len(part.keys), consumers, part.has_more, priority
        )
        staged = [STAGED_ITEM.pack(*item) for item in part.staged.items()] if part.staged else ()
        self._start(pending, Kind.ENCODE, b"".join((head, *part.keys, *staged)))
        return pending

    def open(self, refs: Sequence[SliceRef]) -> PendingOpen:
        """Claim a share of each reference."""
        pending = PendingOpen(self.new_id(), refs, self.served)
        tokens = [TOKEN.pack(ref.token) for ref in refs]
        self._start(pending, Kind.OPEN, b"".join((OPEN_HEAD.pack(pending.request_id), *tokens)))
        return pending

    def cancel(self, pending: Pending) -> None:
        """Give a request up. What it got is released; what arrives later is released on arrival."""
        if self._pending.pop(pending.request_id, None) is not None:
            self.outbox.append(pack_frame(Kind.CANCEL, Cancel(request_id=pending.request_id)))
        for result in pending.results:
            if isinstance(result, Lease):
                result.release()

    def settle(self, requests: Sequence[Pending]) -> None:
        """Requests are over: their grants belong to their user."""
        for pending in requests:
            self._pending.pop(pending.request_id, None)

    def ask(self, kind: Kind, ask: Ask, message: Message | None, body: bytes = b"", fds: Sequence[int] = ()) -> None:
        """Ask something of which one frame is the answer. `fds` are closed once they are sent."""
        self.tidy()
        self._asks[ask.ask_id] = ask
        self.outbox.append(pack_frame(kind, message, body, fds, owned=True))

    def tell(self, kind: Kind, message: Message, body: bytes = b"") -> None:
        """Say something that has no answer."""
        self.outbox.append(pack_frame(kind, message, body))

    def withdraw(self, tokens: Sequence[int]) -> None:
        """End the unclaimed shares of offers, and staged slices."""
        self.tell_tokens(Kind.WITHDRAW, Withdraw(), tokens)

    def tell_tokens(self, kind: Kind, message: Message, tokens: Sequence[int]) -> None:
        """Say something of any number of tokens."""
        for start in range(0, len(tokens), MAX_ITEMS):
            self.tell(kind, message, b"".join(map(TOKEN.pack, tokens[start : start + MAX_ITEMS])))

    def give_up(self, ask: Ask) -> None:
        """Nobody waits for the answer any more. It still comes, or has."""
        ask.is_given_up = True
        if ask.answer is not None:
            ask.undo(ask.answer)

    def drop(self, action: Callable[[], None]) -> None:
        """Do this in `tidy`: for finalizers, which may run in the middle of anything."""
        self._dropped.append(action)

    def receive(self, frame: Frame) -> None:
        """Take a frame in.

        Raises:
            ProtocolError: it does not belong here.
        """
        if frame.kind == Kind.RESULTS:
            close_all(frame.fds)
            self._on_results(frame)
        elif frame.kind == Kind.POOL_ADDED:
            added = parse(PoolAdded, frame)
            (fd,) = take_descriptors(frame, 1)
            try:
                self._pools[added.pool_id] = (
                    DeviceMemory(fd, added.nbytes, added.device, self._ordinal)
                    if added.device
                    else ReadOnlyRegion.attach(fd, SEALS_READERS)
                )
            finally:
                os.close(fd)
        elif frame.kind in ANSWERS:
            self._on_answer(frame)
        else:
            close_all(frame.fds)
            self._on_news(frame)

    def supplied(self, supplying: Supplying) -> None:
        """The bytes that were asked for are prepared: send them. What cannot be sent has its error."""
        pending = supplying.pending
        self.outbox.extend(supplying.frames)  # also when the request is over: what was served may be checked yet
        if not supplying.failed or self._pending.get(pending.request_id) is not pending:
            return
        for position, error in supplying.failed:
            pending.fail(position, type(error), error.reason)
        positions = [position for position, _ in supplying.failed]
        self.tell(Kind.CANCEL, Cancel(request_id=pending.request_id, positions=positions))
        if not pending.num_open:
            self.settle(pending.settled())

    def forget_pools(self) -> None:
        """No grant will come any more: each pool is unmapped when its last lease and view are gone."""
        self._pools.clear()
        self.pages = PageLock()
        if self.staging is not None:
            self.staging.close()

    def say_goodbye(self) -> None:
        """No more calls. Shares that are live go on; all others have ended, those too that are still on the way."""
        self.tidy()
        live = b"".join(ACKNOWLEDGEMENT.pack(token >> 32, token & 0xFFFFFFFF) for token in self.going_on())
        self.outbox.append(pack_frame(Kind.BYE, Bye(), live))

    def _start(self, pending: Pending, kind: Kind, body: bytes) -> None:
        if self._late or self._dropped:
            self.tidy()
        self._pending[pending.request_id] = pending
        self.outbox.append(pack_frame(kind, None, body))

    def _on_news(self, frame: Frame) -> None:
        if frame.kind == Kind.POOL_GONE:
            self._pools.pop(parse(PoolGone, frame).pool_id, None)
        elif frame.kind == Kind.RECALL:
            recall = parse(Recall, frame)
            if (pending := self._pending.get(recall.request_id)) is not None:
                pending.recall(recall.positions)
                self.tidy()  # somebody waits for the acknowledgements
        elif frame.kind == Kind.MODEL_CHANGED:
            self._serve(parse(ModelChanged, frame))
        else:
            raise ProtocolError(f"frame of kind {frame.kind} does not belong here")

    def _serve(self, told: Welcome | ModelChanged) -> None:
        if self.foreign is None:
            self.served = Served(told.fingerprint, told.dtype, told.dim, told.processor)
        else:
            self.served = Served(str(self.foreign.fingerprint), self.foreign.dtype, 0, told.processor)

    def _on_answer(self, frame: Frame) -> None:
        ask = self._asks.pop(Ask.id_of(frame), None)
        if ask is None:
            close_all(frame.fds)
            raise ProtocolError(f"an answer of kind {frame.kind} came that nobody asked for")
        if frame.fds and frame.kind == Kind.STAGE_PLACES:
            (fd,) = take_descriptors(frame, 1)
            try:
                self.staging = SharedRegion.attach(fd)
            finally:
                os.close(fd)
        ask.answer = frame
        if ask.is_given_up:
            ask.undo(frame)

    def _on_results(self, frame: Frame) -> None:
        (request_id,) = RESULTS_HEAD.unpack_from(frame.body)
        grants = frame.body[RESULTS_HEAD.size :]
        pending = self._pending.get(request_id)
        if pending is None:
            for _, slot, generation, *_ in GRANT.iter_unpack(grants):
                self._acknowledge(slot, generation)
            return
        self._on_grants(pending, grants)
        if frame.header:
            self._on_unsettled(pending, parse(Unsettled, frame))
        if not pending.num_open:
            self.settle(pending.settled())

    def _on_unsettled(self, pending: Pending, unsettled: Unsettled) -> None:
        for position, token in zip(unsettled.offered, unsettled.tokens, strict=True):
            pending.offer(position, token)
        for position, kind, reason in zip(unsettled.failed, unsettled.errors, unsettled.reasons, strict=True):
            pending.fail(position, ITEM_ERRORS.get(kind, ItemError), reason, unsettled.retry_after_s)
        if isinstance(pending, PendingEncode) and (unsettled.need or unsettled.verify):
            self.supply(self, Supplying(pending, unsettled.need, unsettled.verify))

    def _on_grants(self, pending: Pending, grants: bytes) -> None:
        keys, results, pools, add, served = pending.keys, pending.results, self._pools, self.live.add, self.served
        for record in GRANT.iter_unpack(grants):
            position = record[0]
            token = record[1] << 32 | record[2]
            results[position] = Lease(self, token, keys[position], pools[record[4]], served, record)
            add(token)
        pending.num_open -= len(grants) // GRANT.size
        pending.granted()

    def tidy(self) -> None:
        """Do what finalizers left, and send acknowledgements that go by message."""
        while self._dropped:
            self._dropped.popleft()()
        if self._late:
            records = [ACKNOWLEDGEMENT.pack(*self._late.popleft()) for _ in range(len(self._late))]
            self.tell(Kind.ACKNOWLEDGE, Acknowledge(), b"".join(records))
