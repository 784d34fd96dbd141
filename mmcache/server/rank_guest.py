"""What a rank's thread runs in a process that is an engine's: the same rank, with its hands off all that is shared.

It neither sets how many threads torch computes with, nor bounds the device's memory, and a fault in one of its threads
ends the rank alone.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable

import torch

from mmcache.errors import ConnectionLost
from mmcache.framing import Kind, pack_frame
from mmcache.server.messages import StartFailed
from mmcache.server.rank_bound import return_memory
from mmcache.server.rank_memory import use_device, use_stream
from mmcache.server.rank_process import LostPoolError, Rank
from mmcache.server.reasons import FAILURES, reason_of
from mmcache.transport import BlockingChannel

log = logging.getLogger(__name__)


class GuestRank(Rank):
    """The rank of a process that is another's. `end` it when it has served."""

    def __init__(self, channel: BlockingChannel, sock: socket.socket) -> None:
        self._sock = sock
        self._threads: list[threading.Thread] = []
        self._is_ending = False
        self.has_failed = False
        super().__init__(channel)

    def failed(self, fault: BaseException) -> None:
        """A fault of ours, in any of its threads: it serves no more."""
        log.error("internal error in the rank's thread", exc_info=fault)
        self.has_failed = True
        self._hang_up()
        self._batches.put(None)

    def end(self) -> torch.device:
        """End its threads, and give the device back that it ran on. It must not be used afterwards."""
        self._is_ending = True
        self._hang_up()
        self._loads.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        return self._device

    def _use_threads(self) -> None:
        """As many as the engine has torch compute with."""

    def _start_thread(self, work: Callable[[], None], name: str) -> None:
        def guarded() -> None:
            try:
                work()
            except BaseException as fault:  # noqa: BLE001  # the process is another's
                self.failed(fault)

        thread = threading.Thread(target=guarded, name=f"mmcache-rank-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _load_each(self) -> None:
        use_device(self._device)
        use_stream(self._device, self._start.has_high_priority, "load")
        with contextlib.suppress(ConnectionLost):
            while not self._is_ending:
                if (load := self._loads.get()) is not None:
                    self._send(pack_frame(Kind.LOADED, self._load(load)))

    def _hang_up(self) -> None:
        """Wake whoever reads the socket."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)


def serve(sock: socket.socket) -> str:
    """Be a rank until the other end closes `sock`, or a fault. Returns why it ended; its memory is given back then."""
    channel = BlockingChannel(sock)
    try:
        device, why = _served(channel, sock)
    except ConnectionLost:
        return "it was not wanted any more when it was ready"
    finally:
        channel.close()
    if device is not None:
        return_memory(device)  # nothing refers to the rank any more
    return why


def _served(channel: BlockingChannel, sock: socket.socket) -> tuple[torch.device | None, str]:
    """The device that it ran on, if it did, and why it ended."""
    rank = _started(channel, sock)
    if rank is None:
        return None, "it could not start"
    try:
        rank.serve()
    except ConnectionLost:
        pass
    except BaseException as fault:  # noqa: BLE001  # the process is another's
        rank.failed(fault)
    device = rank.end()
    return device, "a fault of ours, which was logged" if rank.has_failed else "the coordinator closed its socket"


def _started(channel: BlockingChannel, sock: socket.socket) -> GuestRank | None:
    """A rank that has announced itself; None if it cannot start, and has said why."""
    try:
        rank = GuestRank(channel, sock)
        rank.announce()
    except ConnectionLost:
        raise
    except FAILURES as error:
        lost_pool = isinstance(error, LostPoolError)
        failed = StartFailed(error=type(error).__name__, reason=reason_of(error), lost_pool=lost_pool)
        channel.send(pack_frame(Kind.START_FAILED, failed))
        return None
    return rank
