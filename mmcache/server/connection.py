"""One client's connection: handshake, requests, leases, and what remains of it after the socket is closed."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from ipc.control import ControlMemory
from ipc.leases import Holder
from ipc.pool import Extent
from mmcache._version import __version__
from mmcache.errors import ItemError, NotCached, ProtocolError, ProtocolMismatch
from mmcache.foreign import ForeignModel
from mmcache.framing import Frame, Kind, OutgoingFrame, close_all, pack_frame, parse
from mmcache.keys import namespace_id
from mmcache.protocol import PROTOCOL_VERSION, AnyHello, Hello, PoolAdded, PoolGone, Refused
from mmcache.server.admission import Admission
from mmcache.server.asks import answer
from mmcache.server.calls import Calls
from mmcache.server.channel import Channel
from mmcache.server.flight import Flight
from mmcache.server.lateness import late_errors
from mmcache.server.requests import Request
from mmcache.transport import peer_of, same_process, take_descriptors

if TYPE_CHECKING:
    from mmcache.server.coordinator import Coordinator
    from mmcache.server.facts import ModelFacts
    from mmcache.server.pool_memory import PoolMemory

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 5.0
MAX_HELLO_BYTES = 16 << 10


class Connection:
    """Lives until its socket is closed *and* its last lease has ended."""

    def __init__(self, coordinator: Coordinator, sock: socket.socket) -> None:
        self.coordinator = coordinator
        self._loop = asyncio.get_running_loop()
        self._pid, _ = peer_of(sock)
        self._pidfd = -1
        self.namespace = ""
        self.namespace_id = b""
        self.foreign: ForeignModel | None = None
        self.calls = Calls(coordinator)
        self.admission = Admission()
        self.num_asked = 0
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

    def add_pool(self, memory: PoolMemory) -> None:
        """Hand the client the memory of a pool."""
        added = PoolAdded(pool_id=memory.pool_id, nbytes=memory.nbytes, device=memory.device)
        self.send(pack_frame(Kind.POOL_ADDED, added, fds=[memory.fd]))

    def drop_pool(self, pool_id: int) -> None:
        """Tell the client that no further grant will name the pool; those that do are sent before."""
        self.calls.flush()
        self.send(pack_frame(Kind.POOL_GONE, PoolGone(pool_id=pool_id)))

    def tell_model(self, facts: ModelFacts) -> None:
        """Tell the client that another model is served; what it was granted of the one before is sent before."""
        self.calls.flush()
        self.send(pack_frame(Kind.MODEL_CHANGED, facts.changed()))

    def offer(self, extent: Extent, num_shares: int) -> int:
        """Shares for others on what was just granted; the token of the offer."""
        assert self.holder is not None, "it was granted something"
        return self.coordinator.offers.add(self.holder, extent, num_shares, self.namespace)

    def close_when_idle(self) -> None:
        """Close now, or after the last request in flight."""
        self._closes_when_idle = True
        self._close_if_idle()

    def close(self) -> None:
        """Close now."""
        self._channel.close("shutting down")

    def sweep(self) -> None:
        """End the leases that the client acknowledged."""
        if self.holder is None:
            return
        self.holder.sweep()
        stays = self.holder.num_active or self.coordinator.staging.area_of(self) is not None
        if not self._channel.is_open and not stays:
            self._forget()

    def finished(self, request: Request) -> None:
        """A request is settled, or given up."""
        self.calls.finished(request)
        self._close_if_idle()

    def admit_question(self) -> None:
        """Let the client ask one more question that is answered in the background. Raises as `Admission.check`."""
        self.admission.check(max(self.num_asked, len(self.calls)))

    def answered(self) -> None:
        """One of the questions that are answered in the background is settled."""
        self.num_asked -= 1
        self._close_if_idle()

    def count_error(self, kind: str) -> None:
        """One item failed. That a foreign one is not there is no failure: nothing else can be said of it."""
        if self.foreign is not None and kind == NotCached.__name__:
            self.coordinator.stats.foreign_misses += 1
        else:
            self.coordinator.stats.errors[kind] += 1

    def late_errors(self) -> Callable[[Flight], ItemError]:
        """Gives the error of each position that is open at its request's deadline."""
        assert self.holder is not None, "it has made a request"
        return late_errors(self.coordinator, self.holder)

    def kill(self) -> bool:
        """Send the client's process SIGKILL, whoever has its socket. False if it is dead, or may not be killed."""
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except OSError:
            return False
        return True

    def _close_if_idle(self) -> None:
        if self._closes_when_idle and not self.calls and not self.num_asked:
            self._channel.close("shutting down")

    def _on_frame(self, frame: Frame) -> None:
        if self.holder is None:
            self._greet(frame)
        elif frame.kind == Kind.ENCODE:
            self.calls.on_encode(self, self.holder, frame)
        elif frame.kind == Kind.SUPPLY:
            self.calls.on_supply(self, frame)
        else:
            answer(self, self.holder, frame)

    def _greet(self, frame: Frame) -> None:
        if frame.kind != Kind.HELLO:
            close_all(frame.fds)
            raise ProtocolError(f"the first frame must be HELLO, not {frame.kind}")
        if len(frame.header) > MAX_HELLO_BYTES:
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
        self.namespace = hello.namespace
        self.namespace_id = namespace_id(hello.namespace)
        if hello.foreign is not None:
            self.foreign = ForeignModel.of(hello.foreign.fingerprint, hello.foreign.dtype)
        self.holder = Holder(
            ControlMemory.create(self.coordinator.settings.control_words), hello.name, self._pid,
            on_ended=self.coordinator.stats.leases_ended,
        )  # fmt: skip
        self._loop.add_reader(self._pidfd, self._on_death)
        self.send(pack_frame(Kind.WELCOME, self.coordinator.welcome(self.foreign), fds=[self.holder.control.fd]))
        for memory in self.coordinator.pools.memories.values():
            if not memory.pool.is_retired:
                self.add_pool(memory)

    def _refuse(self, error: ProtocolError) -> None:
        refused = Refused(error=type(error).__name__, reason=str(error))
        self.send(pack_frame(Kind.REFUSED, refused))
        self._channel.close(str(error))

    def _on_close(self, reason: str) -> None:
        self._handshake_timer.cancel()
        self.coordinator.closed()
        self.coordinator.verifier.forget(self)
        self.calls.cancel()
        if self.holder is not None:
            self.coordinator.offers.left(self.holder)
        if self.holder is None:
            self._forget()
            return
        log.debug("connection of %s (pid %d) closed: %s", self.holder.name, self._pid, reason)
        self.holder.sweep()
        stays = self.coordinator.staging.quarantine(self)
        if self.holder.num_active == 0 and not stays:
            self._forget()
        else:
            self.holder.quarantine()

    def _on_death(self) -> None:
        """The client's process is dead, whoever may still hold its socket open."""
        self.end("the process died")

    def end(self, reason: str) -> None:
        """Close it, and forget what is left of it: its leases will not be asked after any more."""
        self._channel.close(reason)
        if self.holder is not None and self._pidfd >= 0:
            self.holder.sweep()
            self.holder.end_all()
            self.coordinator.staging.end(self)
            self._forget()

    def _forget(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        if self.holder is not None:
            self.holder.control.close()
        self.calls.forget()
        self.coordinator.forget(self)
