"""One client's connection: handshake, requests, leases, and what remains of it after the socket is closed."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ipc.control import ControlMemory
from ipc.leases import Holder
from mmcache._version import __version__
from mmcache.errors import ItemError, ProtocolError, ProtocolMismatch
from mmcache.framing import Frame, Kind, OutgoingFrame, close_all, pack_frame, parse
from mmcache.protocol import (
    ACKNOWLEDGEMENT,
    PROTOCOL_VERSION,
    Acknowledge,
    AnyHello,
    Bye,
    Cancel,
    Hello,
    ModelChanged,
    PoolAdded,
    PoolGone,
    Refused,
    Reload,
    StatsReply,
    Supply,
    parse_encode,
)
from mmcache.server.channel import Channel
from mmcache.server.decoders import SharedDescriptor, Supplied
from mmcache.server.requests import Flight, Request
from mmcache.server.supply import check_supply
from mmcache.transport import peer_of, same_process, take_descriptors

if TYPE_CHECKING:
    from mmcache.server.coordinator import Coordinator
    from mmcache.server.facts import ModelFacts
    from mmcache.server.rank import Rank

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 5.0
MAX_REQUESTS = 64
"""Requests in flight on one connection."""
RECENT_REQUESTS = 8
MAX_SMALL_HEADER_BYTES = 16 << 10
"""Headers of all frames but SUPPLY."""
SWEEP_ABOVE = 256
"""A request sweeps its connection's control memory in passing when it holds more shares than this."""


class Connection:
    """Lives until its socket is closed *and* its last lease has ended."""

    def __init__(self, coordinator: Coordinator, sock: socket.socket) -> None:
        self._coordinator = coordinator
        self._loop = asyncio.get_running_loop()
        self._pid, _ = peer_of(sock)
        self._pidfd = -1
        self._namespace = ""
        self._requests: dict[int, Request] = {}
        self._recent: deque[Request] = deque(maxlen=RECENT_REQUESTS)
        self._closes_when_idle = False
        self.holder: Holder | None = None
        self._channel = Channel(coordinator.poller, sock, self._on_frame, self._on_close, is_hurried=True)
        self._handshake_timer = self._loop.call_later(HANDSHAKE_TIMEOUT_S, self._channel.close, "no handshake")

    @property
    def is_open(self) -> bool:
        """Whether its socket is open and greeted."""
        return self._channel.is_open and self.holder is not None

    def send(self, frame: OutgoingFrame) -> None:
        """Send a frame; after the close it is dropped."""
        self._channel.send(frame)

    def add_pool(self, rank: Rank) -> None:
        """Hand the client the memory of a pool."""
        added = PoolAdded(pool_id=rank.pool_id, nbytes=rank.pool.bytes_total)
        self.send(pack_frame(Kind.POOL_ADDED, added, fds=[rank.fd]))

    def drop_pool(self, pool_id: int) -> None:
        """Tell the client that no further grant will name the pool; those that do are sent before."""
        for request in list(self._requests.values()):
            request.flush()
        self.send(pack_frame(Kind.POOL_GONE, PoolGone(pool_id=pool_id)))

    def tell_model(self, facts: ModelFacts) -> None:
        """Tell the client that another model is served; what it was granted of the one before is sent before."""
        for request in list(self._requests.values()):
            request.flush()
        changed = ModelChanged(fingerprint=str(facts.fingerprint), model=facts.model, dtype=facts.dtype, dim=facts.dim)
        self.send(pack_frame(Kind.MODEL_CHANGED, changed))

    def close_when_idle(self) -> None:
        """Close now, or after the last request in flight."""
        self._closes_when_idle = True
        if not self._requests:
            self._channel.close("shutting down")

    def close(self) -> None:
        """Close now."""
        self._channel.close("shutting down")

    def sweep(self) -> None:
        """End the leases that the client acknowledged."""
        if self.holder is None:
            return
        self.holder.sweep()
        if not self._channel.is_open and self.holder.num_active == 0:
            self._forget()

    def finished(self, request: Request) -> None:
        """A request is settled, or given up. Its grants are remembered a while, for a CANCEL that crosses them."""
        if self._requests.get(request.request_id) is request:
            del self._requests[request.request_id]
        self._recent.append(request)
        if self._closes_when_idle and not self._requests:
            self._channel.close("shutting down")

    def count_error(self, kind: str) -> None:
        """One item failed."""
        self._coordinator.stats.errors[kind] += 1

    def late_errors(self) -> Callable[[Flight], ItemError]:
        """Gives the error of each position that is open at its request's deadline."""
        return self._coordinator.late_errors()

    def _on_frame(self, frame: Frame) -> None:
        if self.holder is None:
            self._greet(frame)
        elif frame.kind == Kind.ENCODE:
            self._on_encode(self.holder, frame)
        elif frame.kind == Kind.SUPPLY:
            self._on_supply(frame)
        else:
            close_all(frame.fds)
            self._on_small_frame(self.holder, frame)

    def _on_small_frame(self, holder: Holder, frame: Frame) -> None:
        if len(frame.header) > MAX_SMALL_HEADER_BYTES:
            raise ProtocolError(f"a header of {len(frame.header)} bytes")
        if frame.kind == Kind.CANCEL:
            cancel = parse(Cancel, frame)
            self._on_cancel(holder, cancel)
        elif frame.kind == Kind.ACKNOWLEDGE:
            parse(Acknowledge, frame)
            for slot, generation in _records(frame, holder):
                holder.acknowledge(slot, generation)
        elif frame.kind == Kind.BYE:
            parse(Bye, frame)
            self._on_bye(holder, _records(frame, holder))
        elif frame.kind == Kind.STATS:
            stats = json.dumps(self._coordinator.snapshot()).encode()
            self.send(pack_frame(Kind.STATS_REPLY, StatsReply(), stats))
        elif frame.kind == Kind.RELOAD:
            self._coordinator.reloads.start(
                parse(Reload, frame), lambda reloaded: self.send(pack_frame(Kind.RELOADED, reloaded))
            )
        else:
            raise ProtocolError(f"frame of kind {frame.kind} does not belong here")

    def _greet(self, frame: Frame) -> None:
        if frame.kind != Kind.HELLO:
            close_all(frame.fds)
            raise ProtocolError(f"the first frame must be HELLO, not {frame.kind}")
        if len(frame.header) > MAX_SMALL_HEADER_BYTES:
            close_all(frame.fds)
            raise ProtocolError(f"a header of {len(frame.header)} bytes")
        (self._pidfd,) = take_descriptors(frame, 1)
        self._handshake_timer.cancel()
        # A peer of another protocol version may say things this one cannot parse.
        protocol = parse(AnyHello, frame).protocol
        if protocol != PROTOCOL_VERSION:
            reason = f"the client speaks protocol {protocol}, this sidecar ({__version__}) speaks {PROTOCOL_VERSION}"
            self._refuse(ProtocolMismatch(reason))
            return
        hello = parse(Hello, frame)
        if not same_process(self._pidfd, self._pid):
            self._refuse(ProtocolError("the descriptor of HELLO is not a pidfd of the connecting process"))
            return
        self._namespace = hello.namespace
        self.holder = Holder(ControlMemory.create(self._coordinator.settings.control_words), hello.name, self._pid)
        self._loop.add_reader(self._pidfd, self._on_death)
        self.send(pack_frame(Kind.WELCOME, self._coordinator.welcome(), fds=[self.holder.control.fd]))
        for rank in self._coordinator.ranks.ready:
            self.add_pool(rank)

    def _refuse(self, error: ProtocolError) -> None:
        refused = Refused(error=type(error).__name__, reason=str(error))
        self.send(pack_frame(Kind.REFUSED, refused))
        self._channel.close(str(error))

    def _on_encode(self, holder: Holder, frame: Frame) -> None:
        if frame.fds:
            close_all(frame.fds)
        request_id, timeout_ms, has_more, keys = parse_encode(frame)
        if request_id in self._requests or len(self._requests) == MAX_REQUESTS:
            raise ProtocolError(f"request {request_id} is in flight already, or {MAX_REQUESTS} others are")
        request = self._requests[request_id] = Request(self, holder, request_id, keys, timeout_ms / 1000)
        self._coordinator.serve_batch(request)
        if has_more:
            self._coordinator.poller.expect_more()
        if holder.num_active > SWEEP_ABOVE:
            holder.sweep()

    def _on_supply(self, frame: Frame) -> None:
        (fd,) = take_descriptors(frame, 1)
        memory = SharedDescriptor(fd)
        try:
            supply = parse(Supply, frame)
            check_supply(supply, fd, self._coordinator.settings.max_item_bytes)
            self._hand_over(supply, memory)
        finally:
            memory.release()

    def _hand_over(self, supply: Supply, memory: SharedDescriptor) -> None:
        """To whom the bytes were asked for; what nobody waits for any more is dropped."""
        request = self._requests.get(supply.request_id)
        columns = (supply.positions, supply.kinds, supply.headers, supply.offsets, supply.sizes)
        for position, kind, header, offset, size in zip(*columns, strict=True):
            supplied = Supplied(memory, self._namespace, kind, header, offset, size)
            if request is None or position not in request.asked:
                self._coordinator.verifier.supply(self, supply.request_id, position, supplied)
            elif (flight := request.open.get(position)) is not None and flight.supply(request, position, supplied):
                memory.share()

    def _on_cancel(self, holder: Holder, cancel: Cancel) -> None:
        request = self._requests.get(cancel.request_id)
        if request is not None:
            request.cancel(cancel.positions)
        if cancel.positions:
            return
        # The client has given up all of it, with the grants that are still on their way to it.
        given_up = [recent for recent in self._recent if recent.request_id == cancel.request_id]
        grants = {grant for recent in given_up for grant in recent.grants()}
        holder.sweep()
        for share in holder.shares() if grants else ():
            if (share.slot, share.generation) in grants:
                holder.acknowledge(share.slot, share.generation)

    def _on_bye(self, holder: Holder, held: set[tuple[int, int]]) -> None:
        for request in list(self._requests.values()):
            request.cancel([])
        for share in holder.shares():
            if (share.slot, share.generation) not in held:
                holder.acknowledge(share.slot, share.generation)

    def _on_close(self, reason: str) -> None:
        self._handshake_timer.cancel()
        self._coordinator.closed()
        self._coordinator.verifier.forget(self)
        for request in list(self._requests.values()):
            request.cancel([])
        if self.holder is None:
            self._forget()
            return
        log.debug("connection of %s (pid %d) closed: %s", self.holder.name, self._pid, reason)
        self.holder.sweep()
        if self.holder.num_active == 0:
            self._forget()
        else:
            self.holder.quarantine()

    def _on_death(self) -> None:
        """The client's process is dead, whoever may still hold its socket open."""
        assert self.holder is not None, "its pidfd is watched from the handshake on"
        self._channel.close("the process died")
        if self._pidfd >= 0:
            self.holder.sweep()
            self.holder.end_all()
            self._forget()

    def _forget(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        if self.holder is not None:
            self.holder.control.close()
        self._coordinator.forget(self)


def _records(frame: Frame, holder: Holder) -> set[tuple[int, int]]:
    num_records, rest = divmod(len(frame.body), ACKNOWLEDGEMENT.size)
    if rest or num_records > holder.control.num_words:
        raise ProtocolError(f"acknowledgements of {len(frame.body)} bytes are not whole records, or too many")
    return {(slot, generation) for slot, generation in ACKNOWLEDGEMENT.iter_unpack(frame.body)}
