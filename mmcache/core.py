"""A client's connection without its I/O: frames in, frames out. The faces of client.py and aio.py move them.

Threads: the faces call this one at a time; only `acknowledge` and `drop` may come from anywhere, at any time.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from ipc.control import ControlMemory
from ipc.errors import IpcError
from ipc.memory_shm import SEALS_READERS, ReadOnlyRegion, SharedRegion, sealed_copy
from mmcache.errors import ITEM_ERRORS, ItemError, ProtocolError, UnreadableItem
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
    Supply,
    Unsettled,
    Welcome,
    Withdraw,
)
from mmcache.records import (
    ACKNOWLEDGEMENT,
    ENCODE_HEAD,
    GRANT,
    MAX_REQUESTS,
    MAX_TIMEOUT_MS,
    OPEN_HEAD,
    RESULTS_HEAD,
    STAGED_ITEM,
    SUPPLY_WINDOW,
    TOKEN,
)
from mmcache.refs import SliceRef
from mmcache.transport import take_descriptors

MAX_SUPPLY_BYTES = 256 << 20
"""One memfd carries up to this many bytes, or one item."""


class ClientCore:
    """State of one connection after the handshake.

    Attributes:
        outbox: frames to send, in order.
        live: tokens (slot and generation in one number) of shares that are not acknowledged; of them
        held: those that only the death of their memory acknowledges.
        served: the model that is served, as far as was heard.
        staging: this client's region for pixels, once it has one.
    """

    def __init__(self, welcome: Welcome, control_fd: int, namespace: str) -> None:
        self.welcome = welcome
        self.hasher = KeyHasher(welcome.seed, namespace)
        self.control = ControlMemory.attach(control_fd)
        os.close(control_fd)
        self.outbox: deque[OutgoingFrame] = deque()
        self.served = Served(welcome.fingerprint, welcome.dtype, welcome.dim, welcome.processor)
        self.staging: SharedRegion | None = None
        self.live: set[int] = set()
        self.held: set[int] = set()
        self._getpid = os.getpid  # also there when the interpreter goes down
        self._pid = os.getpid()
        self._pools: dict[int, ReadOnlyRegion] = {}
        self._pending: dict[int, Pending] = {}
        self._asks: dict[int, Ask] = {}
        self._last_id = 0
        self._dropped: deque[Callable[[], None]] = deque()
        self._late: deque[tuple[int, int]] = deque()
        ordered = self.control.store_is_ordered
        self._acknowledge = self.control.acknowledge if ordered else self._acknowledge_late

    @property
    def is_mine(self) -> bool:
        """Whether this process opened the connection; a forked child must not acknowledge its parent's shares."""
        return self._getpid() == self._pid

    @property
    def is_full(self) -> bool:
        """Whether as many requests are in flight as may be."""
        return len(self._pending) >= MAX_REQUESTS

    def new_id(self) -> int:
        """An id that nothing in flight has."""
        self._last_id = (self._last_id + 1) & 0xFFFFFFFF
        return self._last_id

    def encode(self, part: Part, timeout_s: float, call_id: int = 0, consumers: int = 0) -> PendingEncode:
        """Start a request for the items of `part`."""
        pending = PendingEncode(self.new_id(), part)
        head = ENCODE_HEAD.pack(
            pending.request_id, milliseconds(timeout_s), call_id, len(part.keys), consumers, part.has_more
        )
        staged = [STAGED_ITEM.pack(*item) for item in part.staged.items()] if part.staged else ()
        self._start(pending, Kind.ENCODE, b"".join((head, *part.keys, *staged)))
        return pending

    def open(self, refs: Sequence[SliceRef]) -> PendingOpen:
        """Claim a share of each reference."""
        pending = PendingOpen(self.new_id(), refs)
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
        self._asks[ask.ask_id] = ask
        self._tidy()
        self.outbox.append(pack_frame(kind, message, body, fds, owned=True))

    def tell(self, kind: Kind, message: Message, body: bytes = b"") -> None:
        """Say something that has no answer."""
        self.outbox.append(pack_frame(kind, message, body))

    def withdraw(self, tokens: Sequence[int]) -> None:
        """End the unclaimed shares of offers, and staged slices."""
        self.tell(Kind.WITHDRAW, Withdraw(), b"".join(map(TOKEN.pack, tokens)))

    def give_up(self, ask: Ask) -> None:
        """Nobody waits for the answer any more."""
        self._asks[ask.ask_id] = Ask(ask.ask_id)  # its answer still comes

    def drop(self, action: Callable[[], None]) -> None:
        """Do this with the next call: for finalizers, which may run in the middle of anything."""
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
                self._pools[added.pool_id] = ReadOnlyRegion.attach(fd, SEALS_READERS)
            finally:
                os.close(fd)
        elif frame.kind in ANSWERS:
            self._on_answer(frame)
        else:
            close_all(frame.fds)
            self._on_news(frame)

    def acknowledge(self, token: int) -> None:
        """A share ends. A store into the control memory; where stores are not ordered, a message with the next call."""
        if token not in self.live or not self.is_mine:
            return
        try:
            self.live.remove(token)
        except KeyError:  # another thread was faster
            return
        if self.held:
            self.held.discard(token)
        self._acknowledge(token >> 32, token & 0xFFFFFFFF)

    def release_all(self) -> None:
        """Acknowledge every share but held ones."""
        for token in self.live - self.held:
            self.acknowledge(token)

    def forget_pools(self) -> None:
        """No grant will come any more: each pool is unmapped when its last lease and view are gone."""
        self._pools.clear()
        if self.staging is not None:
            self.staging.close()

    def say_goodbye(self) -> None:
        """No more calls. Shares that are live go on; all others have ended, those too that are still on the way."""
        self._tidy()
        live = b"".join(ACKNOWLEDGEMENT.pack(token >> 32, token & 0xFFFFFFFF) for token in tuple(self.live))
        self.outbox.append(pack_frame(Kind.BYE, Bye(), live))

    def _start(self, pending: Pending, kind: Kind, body: bytes) -> None:
        self._pending[pending.request_id] = pending
        if self._late or self._dropped:
            self._tidy()
        self.outbox.append(pack_frame(kind, None, body))

    def _acknowledge_late(self, slot: int, generation: int) -> None:
        self._late.append((slot, generation))

    def _on_news(self, frame: Frame) -> None:
        if frame.kind == Kind.POOL_GONE:
            self._pools.pop(parse(PoolGone, frame).pool_id, None)
        elif frame.kind == Kind.RECALL:
            recall = parse(Recall, frame)
            if (pending := self._pending.get(recall.request_id)) is not None:
                pending.recall(recall.positions)
                self._tidy()  # somebody waits for the acknowledgements
        elif frame.kind == Kind.MODEL_CHANGED:
            changed = parse(ModelChanged, frame)
            self.served = Served(changed.fingerprint, changed.dtype, changed.dim, changed.processor)
        else:
            raise ProtocolError(f"frame of kind {frame.kind} does not belong here")

    def _on_answer(self, frame: Frame) -> None:
        ask = self._asks.pop(Ask.id_of(frame), None)
        if ask is None:
            close_all(frame.fds)
            raise ProtocolError(f"an answer of kind {frame.kind} came that nobody asked for")
        if frame.fds:
            (fd,) = take_descriptors(frame, 1)
            try:
                self.staging = SharedRegion.attach(fd)
            finally:
                os.close(fd)
        ask.answer = frame

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
            pending.fail(position, ITEM_ERRORS.get(kind, ItemError), reason)
        if isinstance(pending, PendingEncode):
            if unsettled.need:
                self._supply(pending, unsettled.need)
            if unsettled.verify:
                self._supply_to_verify(pending, unsettled.verify[:SUPPLY_WINDOW])

    def _on_grants(self, pending: Pending, grants: bytes) -> None:
        keys, results, pools, add, served = pending.keys, pending.results, self._pools, self.live.add, self.served
        num = 0
        for record in GRANT.iter_unpack(grants):
            position, slot, generation, _, pool_id, *_ = record
            token = slot << 32 | generation
            of = served if pending.served is None else pending.served[position]
            results[position] = Lease(self, token, keys[position], pools[pool_id], of, record)
            add(token)
            num += 1
        pending.num_open -= num

    def _supply(self, pending: PendingEncode, positions: Sequence[int]) -> None:
        """Send the bytes of needed items, a memfd for as many of them as its bound allows."""
        batch: list[int] = []
        nbytes = 0
        for position in positions:
            try:
                size = pending.part.media(position).nbytes
            except ItemError as error:
                self._leave_out(pending, [position], error)
                continue
            if batch and nbytes + size > MAX_SUPPLY_BYTES:
                self._send_supply(pending, batch)
                batch, nbytes = [], 0
            batch.append(position)
            nbytes += size
        if batch:
            self._send_supply(pending, batch)

    def _supply_to_verify(self, pending: PendingEncode, positions: Sequence[int]) -> None:
        """Send the bytes of items that are served already, a memfd each; one that cannot be sent is left out."""
        for position in positions:
            with suppress(IpcError, ItemError):
                self.outbox.append(_supply_frame(pending, [position]))

    def _send_supply(self, pending: PendingEncode, positions: Sequence[int]) -> None:
        try:
            self.outbox.append(_supply_frame(pending, positions))
        except (IpcError, ItemError) as error:
            self._leave_out(pending, positions, UnreadableItem(f"cannot be sent: {error}"))

    def _leave_out(self, pending: PendingEncode, positions: Sequence[int], error: ItemError) -> None:
        for position in positions:
            pending.fail(position, type(error), error.reason)
        self.tell(Kind.CANCEL, Cancel(request_id=pending.request_id, positions=list(positions)))

    def _tidy(self) -> None:
        """Do what finalizers left, and send acknowledgements that go by message."""
        while self._dropped:
            self._dropped.popleft()()
        records = []
        while self._late:
            records.append(ACKNOWLEDGEMENT.pack(*self._late.popleft()))
        if records:
            self.tell(Kind.ACKNOWLEDGE, Acknowledge(), b"".join(records))


def milliseconds(seconds: float) -> int:
    """As frames carry a time."""
    return max(0, min(int(seconds * 1000), MAX_TIMEOUT_MS))


def _supply_frame(pending: PendingEncode, positions: Sequence[int]) -> OutgoingFrame:
    """The bytes of some items in one memfd. Raises `IpcError` if there is none to be had."""
    media = [pending.part.media(position) for position in positions]
    fd, offsets = sealed_copy("mmcache-supply", [item.raw for item in media])
    supply = Supply(
        request_id=pending.request_id, positions=list(positions), kinds=[item.kind for item in media],
        headers=[item.header for item in media], offsets=offsets, sizes=[item.nbytes for item in media],
    )  # fmt: skip
    return pack_frame(Kind.SUPPLY, supply, fds=[fd], owned=True)
