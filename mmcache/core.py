"""A client's connection without its I/O: frames in, frames out. The faces of client.py move them.

Threads: the faces call this one at a time; only `acknowledge` may come from anywhere, at any time.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from ipc.control import ControlMemory
from ipc.errors import IpcError
from ipc.memory_shm import SEALS_READERS, ReadOnlyRegion, sealed_copy
from mmcache.errors import (
    ITEM_ERRORS,
    CheckpointError,
    ConfigError,
    ItemError,
    ProtocolError,
    SidecarError,
    UnreadableItem,
)
from mmcache.framing import Frame, Kind, OutgoingFrame, close_all, pack_frame, parse
from mmcache.keys import KeyHasher
from mmcache.lease import Lease, Served
from mmcache.parts import Part
from mmcache.protocol import (
    ACKNOWLEDGEMENT,
    ENCODE_HEAD,
    GRANT,
    MAX_TIMEOUT_MS,
    RESULTS_HEAD,
    SUPPLY_WINDOW,
    Acknowledge,
    Bye,
    Cancel,
    ModelChanged,
    PoolAdded,
    PoolGone,
    Reload,
    Reloaded,
    StatsRequest,
    Supply,
    Unsettled,
    Welcome,
)
from mmcache.transport import take_descriptors

MAX_SUPPLY_BYTES = 256 << 20
"""One memfd carries up to this many bytes, or one item."""


class PendingEncode:
    """One request in flight. `results` fills in place: a lease or an error for each of its positions."""

    __slots__ = ("keys", "media", "num_open", "places", "request_id", "results")

    def __init__(self, request_id: int, part: Part) -> None:
        self.request_id = request_id
        self.places, self.media, self.keys = part.places, part.media, part.keys
        self.results: list[Lease | ItemError | None] = [None] * len(part.keys)
        self.num_open = len(part.keys)

    @property
    def is_done(self) -> bool:
        """Whether every position is settled."""
        return self.num_open == 0

    def fail(self, position: int, kind: str, reason: str) -> None:
        """A position has its error."""
        index, source = self.places[position], self.media[position].source
        self.results[position] = ITEM_ERRORS.get(kind, ItemError)(reason, index=index, source=source)
        self.num_open -= 1


class ClientCore:
    """State of one connection after the handshake.

    Attributes:
        outbox: frames to send, in order.
        live: tokens (slot and generation in one number) of shares that are not acknowledged; of them
        held: those that only the death of their memory acknowledges.
        stats_reply: the last reply to `ask_stats`, or None.
        reload_reply: the reply to the last `ask_reload`, or None.
        served: the model that is served, as far as was heard.
    """

    def __init__(self, welcome: Welcome, control_fd: int, namespace: str) -> None:
        self.welcome = welcome
        self.hasher = KeyHasher(welcome.seed, namespace)
        self.control = ControlMemory.attach(control_fd)
        os.close(control_fd)
        self.outbox: deque[OutgoingFrame] = deque()
        self.stats_reply: bytes | None = None
        self._num_stats_due = 0
        self.reload_reply: Reloaded | None = None
        self._last_reload = 0
        self.served = Served(welcome.fingerprint, welcome.dtype, welcome.dim)
        self._getpid = os.getpid  # also there when the interpreter goes down
        self._pid = os.getpid()
        self._pools: dict[int, ReadOnlyRegion] = {}
        self._pending: dict[int, PendingEncode] = {}
        self._last_request = 0
        self.live: set[int] = set()
        self.held: set[int] = set()
        self._late: deque[tuple[int, int]] = deque()
        ordered = self.control.store_is_ordered
        self._acknowledge = self.control.acknowledge if ordered else self._acknowledge_late

    @property
    def is_mine(self) -> bool:
        """Whether this process opened the connection; a forked child must not acknowledge its parent's shares."""
        return self._getpid() == self._pid

    def encode(self, part: Part, timeout_s: float) -> PendingEncode:
        """Start a request for the items of `part`."""
        self._last_request = (self._last_request + 1) & 0xFFFFFFFF
        pending = PendingEncode(self._last_request, part)
        self._pending[pending.request_id] = pending
        if self._late:
            self._flush_late()
        head = ENCODE_HEAD.pack(pending.request_id, min(int(timeout_s * 1000), MAX_TIMEOUT_MS), part.has_more)
        self.outbox.append(pack_frame(Kind.ENCODE, None, b"".join((head, *part.keys))))
        return pending

    def cancel(self, pending: PendingEncode) -> None:
        """Give a request up. What it got is released; what arrives later is released on arrival."""
        if self._pending.pop(pending.request_id, None) is not None:
            self.outbox.append(pack_frame(Kind.CANCEL, Cancel(request_id=pending.request_id)))
        for result in pending.results:
            if isinstance(result, Lease):
                result.release()

    def ask_stats(self) -> None:
        """Ask for the counters."""
        self.stats_reply = None
        self._num_stats_due += 1
        self.outbox.append(pack_frame(Kind.STATS, StatsRequest()))

    def ask_reload(self, model: str, folder: str) -> None:
        """Ask for new weights; see `Reload`."""
        self.reload_reply = None
        self._last_reload += 1
        self.outbox.append(pack_frame(Kind.RELOAD, Reload(reload_id=self._last_reload, model=model, folder=folder)))

    def check_reload(self) -> None:
        """Raise the ConfigError, CheckpointError or SidecarError that the last reload ended with, if it did."""
        reply = self.reload_reply
        if reply is not None and reply.error:
            kinds = {"ConfigError": ConfigError, "CheckpointError": CheckpointError}
            raise kinds.get(reply.error, SidecarError)(reply.reason)

    def receive(self, frame: Frame) -> None:
        """Take a frame in.

        Raises:
            ProtocolError: it does not belong here.
        """
        if frame.kind == Kind.POOL_ADDED:
            added = parse(PoolAdded, frame)
            (fd,) = take_descriptors(frame, 1)
            try:
                self._pools[added.pool_id] = ReadOnlyRegion.attach(fd, SEALS_READERS)
            finally:
                os.close(fd)
            return
        close_all(frame.fds)
        if frame.kind == Kind.RESULTS:
            self._on_results(frame)
        elif frame.kind == Kind.POOL_GONE:
            self._pools.pop(parse(PoolGone, frame).pool_id, None)
        elif frame.kind == Kind.STATS_REPLY:
            self._num_stats_due -= 1  # an earlier call may have given up before its answer came
            self.stats_reply = frame.body if self._num_stats_due == 0 else None
        elif frame.kind == Kind.MODEL_CHANGED:
            changed = parse(ModelChanged, frame)
            self.served = Served(changed.fingerprint, changed.dtype, changed.dim)
        elif frame.kind == Kind.RELOADED:
            reloaded = parse(Reloaded, frame)  # an earlier call may have given up before its answer came
            self.reload_reply = reloaded if reloaded.reload_id == self._last_reload else None
        else:
            raise ProtocolError(f"frame of kind {frame.kind} does not belong here")

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

    def say_goodbye(self) -> None:
        """No more calls. Shares that are live go on; all others have ended, those too that are still on the way."""
        self._flush_late()
        live = b"".join(ACKNOWLEDGEMENT.pack(token >> 32, token & 0xFFFFFFFF) for token in tuple(self.live))
        self.outbox.append(pack_frame(Kind.BYE, Bye(), live))

    def _acknowledge_late(self, slot: int, generation: int) -> None:
        self._late.append((slot, generation))

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
            unsettled = parse(Unsettled, frame)
            for position, kind, reason in zip(unsettled.failed, unsettled.errors, unsettled.reasons, strict=True):
                pending.fail(position, kind, reason)
            if unsettled.need:
                self._supply(pending, unsettled.need)
            if unsettled.verify:
                self._supply_to_verify(pending, unsettled.verify[:SUPPLY_WINDOW])
        if pending.is_done:
            self._pending.pop(request_id, None)

    def _on_grants(self, pending: PendingEncode, grants: bytes) -> None:
        keys, results, pools, add, served = pending.keys, pending.results, self._pools, self.live.add, self.served
        for record in GRANT.iter_unpack(grants):
            position, slot, generation, _, pool_id, *_ = record
            token = slot << 32 | generation
            results[position] = Lease(self, token, keys[position], pools[pool_id], served, record)
            add(token)
        pending.num_open -= len(grants) // GRANT.size

    def _supply(self, pending: PendingEncode, positions: Sequence[int]) -> None:
        """Send the bytes of needed items, a memfd for as many of them as its bound allows."""
        batch: list[int] = []
        nbytes = 0
        for position in positions:
            size = pending.media[position].nbytes
            if batch and nbytes + size > MAX_SUPPLY_BYTES:
                self._send_supply(pending, batch)
                batch, nbytes = [], 0
            batch.append(position)
            nbytes += size
        self._send_supply(pending, batch)

    def _supply_to_verify(self, pending: PendingEncode, positions: Sequence[int]) -> None:
        """Send the bytes of items that are served already, a memfd each; one that cannot be sent is left out."""
        for position in positions:
            with suppress(IpcError):
                self.outbox.append(_supply_frame(pending, [position]))

    def _send_supply(self, pending: PendingEncode, positions: Sequence[int]) -> None:
        try:
            self.outbox.append(_supply_frame(pending, positions))
        except IpcError as error:
            for position in positions:
                pending.fail(position, UnreadableItem.__name__, f"cannot be sent: {error}")
            cancel = Cancel(request_id=pending.request_id, positions=list(positions))
            self.outbox.append(pack_frame(Kind.CANCEL, cancel))

    def _flush_late(self) -> None:
        records = []
        while self._late:
            records.append(ACKNOWLEDGEMENT.pack(*self._late.popleft()))
        if records:
            self.outbox.append(pack_frame(Kind.ACKNOWLEDGE, Acknowledge(), b"".join(records)))


def _supply_frame(pending: PendingEncode, positions: Sequence[int]) -> OutgoingFrame:
    """The bytes of some items in one memfd. Raises `IpcError` if there is none to be had."""
    media = [pending.media[position] for position in positions]
    fd, offsets = sealed_copy("mmcache-supply", [item.raw for item in media])
    supply = Supply(
        request_id=pending.request_id, positions=list(positions), kinds=[item.kind for item in media],
        headers=[item.header for item in media], offsets=offsets, sizes=[item.nbytes for item in media],
    )  # fmt: skip
    return pack_frame(Kind.SUPPLY, supply, fds=[fd], owned=True)
