"""A rank on a thread of the coordinator's own process, for an engine that has no sidecar beside it. No torch here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable

from mmcache.framing import Frame, OutgoingFrame
from mmcache.server.channel import Channel, Poller

log = logging.getLogger(__name__)

END_TIMEOUT_S = 60.0
"""A thread cannot be killed: who stops it waits this long for what it is doing, and then leaves it behind."""


def spawn_thread(
    poller: Poller, _module: str, on_frame: Callable[[Frame], None], on_exit: Callable[[str], None],
    _environ: dict[str, str],
) -> RankThread:  # fmt: skip
    """Start one, as `Child` starts a process. The one that it is in keeps its environment."""
    return RankThread(poller, on_frame, on_exit)


class RankThread:
    """Stands where `Child` does, and is spoken to as that is.

    `on_exit` is called once, on the loop, when the thread has ended, what it sent was heard and its memory is unmapped.
    A fault in it is logged and ends the thread, not the process. Nothing can end one that hangs.
    """

    def __init__(self, poller: Poller, on_frame: Callable[[Frame], None], on_exit: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_exit = on_exit
        self._exited = self._loop.create_future()
        self._reason: str | None = None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.channel = Channel(poller, ours, on_frame, self._channel_closed)
        threading.Thread(target=self._run, args=(theirs,), name="mmcache-rank", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id, which is the engine's."""
        return os.getpid()

    def send(self, frame: OutgoingFrame) -> None:
        """Send a frame; to a thread that has ended it is dropped."""
        self.channel.send(frame)

    def kill(self) -> None:
        """End it as soon as it is done with what it does. `on_exit` follows then."""
        self.channel.close("it was to end")

    async def stop(self, timeout_s: float) -> None:
        """End the thread when it is done with what it does, which may take longer than `timeout_s`."""
        self.channel.close("stopping")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._exited), max(timeout_s, END_TIMEOUT_S))
            return
        log.error("the rank's thread hangs; it is left behind, with its memory")

    def _run(self, sock: socket.socket) -> None:
        reason = "a fault of ours, which was logged"
        try:
            from mmcache.server.rank_guest import serve

            reason = serve(sock)
        except BaseException:  # whatever it is, the process is another's
            log.exception("internal error in the rank's thread")
        finally:
            sock.close()
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._ended, reason)

    def _ended(self, reason: str) -> None:
        self._reason = reason
        if not self.channel.is_open:
            self._exit()

    def _channel_closed(self, _: str) -> None:
        """By either end. If by the thread's, everything that it sent has come before."""
        if self._reason is not None:
            self._exit()

    def _exit(self) -> None:
        self._exited.set_result(None)
        self._on_exit(f"the rank's thread ended: {self._reason}")
