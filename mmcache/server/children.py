"""The sidecar's own processes: spawned (never forked), tied to the sidecar's life, and talked to over a socket pair."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeAlias

from mmcache.framing import Frame, OutgoingFrame
from mmcache.server.channel import Channel, Poller
from mmcache.transport import BlockingChannel, raise_descriptor_limit

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
RESTART_DELAYS_S = (0.0, 0.1, 0.5, 2.0, 10.0)
"""Before a dead process is replaced, by how many died before it without having done any work."""
END_GRACE_S = 2.0
"""A process whose socket is closed is given this long to end by itself: its own status says more than SIGKILL's."""


def restart_delay_s(deaths_in_a_row: int) -> float:
    """Seconds to wait before the next try."""
    return RESTART_DELAYS_S[min(deaths_in_a_row, len(RESTART_DELAYS_S) - 1)]


class Worker(Protocol):
    """What does a rank's work, on its own or on a thread of this process."""

    @property
    def pid(self) -> int: ...
    def send(self, frame: OutgoingFrame) -> None: ...
    def kill(self) -> None: ...
    async def stop(self, timeout_s: float) -> None: ...


Spawn: TypeAlias = "Callable[[Poller, str, Callable[[Frame], None], Callable[[str], None], dict[str, str]], Worker]"
"""Starts one, as `Child` does."""


class Child:
    """A process that runs `python -m MODULE` with one end of a socket pair as its descriptor 3.

    `on_exit` is called once, on the loop, when the process is known to be dead: never before, so that memory which it
    might still write is not taken for free.

    Raises (constructor):
        OSError: no descriptor, process or memory is left for it.
    """

    def __init__(
        self,
        poller: Poller,
        module: str,
        on_frame: Callable[[Frame], None],
        on_exit: Callable[[str], None],
        environ: dict[str, str],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_exit = on_exit
        self._module = module
        self._exited = self._loop.create_future()
        self._why_killed = ""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=os.environ | _same_code() | environ,
                    start_new_session=True,  # Ctrl-C goes to the sidecar alone, which drains first
                )
            self._pidfd = self._watched()
        except OSError:
            ours.close()
            raise
        self._loop.add_reader(self._pidfd, self._died)
        self.channel = Channel(poller, ours, on_frame, self._channel_closed, gathers=True)

    def _watched(self) -> int:
        try:
            return os.pidfd_open(self._process.pid)
        except OSError:
            self._process.kill()
            self._process.wait()
            raise

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def send(self, frame: OutgoingFrame) -> None:
        """Send a frame; to a dead process it is dropped."""
        self.channel.send(frame)

    def kill(self) -> None:
        """Send SIGKILL. `on_exit` follows when it is dead."""
        if not self._exited.done():
            self._process.kill()

    async def stop(self, timeout_s: float) -> None:
        """End the process: by the end of its socket, and by SIGKILL when it does not follow within `timeout_s`."""
        self.channel.close("stopping")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._exited), timeout_s)
            return
        self.kill()
        await self._exited

    def _channel_closed(self, reason: str) -> None:
        # A process whose socket is closed has nothing left to do: it is ending, or it is broken.
        if reason not in ("stopping", "exited"):
            self._loop.call_later(END_GRACE_S, self._end, reason)

    def _end(self, reason: str) -> None:
        if not self._exited.done():
            self._why_killed = f", which was sent because {reason} and it did not end by itself"
            self.kill()

    def _died(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        status = self._process.wait()
        self._exited.set_result(None)
        self.channel.close("exited")
        cause = signal.Signals(-status).name if status < 0 else f"status {status}"
        self._on_exit(f"{self._module.rsplit('.', 1)[-1]} (pid {self.pid}) ended with {cause}{self._why_killed}")


def _same_code() -> dict[str, str]:
    """What makes a child import the code that the sidecar runs, whatever lies in the current folder."""
    root = str(Path(__file__).parents[2])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def connect_to_parent(argv: list[str]) -> BlockingChannel:
    """The child's first act: tie its life to the parent's and open the socket it was handed."""
    fd, parent = int(argv[1]), int(argv[2])
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit(1)  # it died before the line above
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise_descriptor_limit()
    return BlockingChannel(socket.socket(fileno=fd))
