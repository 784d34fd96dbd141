"""What systemd is told: that the sidecar is ready, that it stops, and regularly that its loop still turns."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping

log = logging.getLogger(__name__)


class Notifier:
    """Speaks to whoever started the process, if that wants to hear anything. Nothing of it ever fails the sidecar.

    Args:
        environ: NOTIFY_SOCKET, a path or, with @ in front, a name in the abstract namespace; WATCHDOG_USEC and
            WATCHDOG_PID: within how many microseconds it wants to hear of this process again.
        pid: of this process.
    """

    def __init__(self, environ: Mapping[str, str], pid: int) -> None:
        self._address = _address(environ.get("NOTIFY_SOCKET", ""))
        self._interval_s = _interval_s(environ, pid)
        self._timer: asyncio.TimerHandle | None = None

    def ready(self, status: str) -> None:
        """Requests are served from now on; from now on it hears of every turn of the watchdog."""
        self._send(f"READY=1\nSTATUS={_line(status)}")
        if self._address is not None and self._interval_s:
            self._turn()

    def stopping(self, status: str) -> None:
        """The sidecar ends, which may take a while."""
        self._send(f"STOPPING=1\nSTATUS={_line(status)}")

    def close(self) -> None:
        """No more turns."""
        if self._timer is not None:
            self._timer.cancel()

    def _turn(self) -> None:
        self._send("WATCHDOG=1")
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._turn)

    def _send(self, state: str) -> None:
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.setblocking(False)
                sock.sendto(state.encode(), self._address)
        except OSError as error:
            log.warning("NOTIFY_SOCKET: %s was not sent: %s", state.partition("=")[0], error.strerror)


def _address(name: str) -> str | None:
    if name[:1] == "@":
        return f"\0{name[1:]}"
    if name[:1] == "/":
        return name
    if name:
        log.warning("NOTIFY_SOCKET is neither a path nor begins with @; nobody is told anything")
    return None


def _interval_s(environ: Mapping[str, str], pid: int) -> float:
    """Half of the watchdog's time; 0 if there is none, or it is another process's."""
    if environ.get("WATCHDOG_PID", str(pid)) != str(pid):
        return 0.0
    try:
        return max(0.0, int(environ.get("WATCHDOG_USEC", "0")) / 2e6)
    except ValueError:
        log.warning("WATCHDOG_USEC is no number; the watchdog hears nothing")
        return 0.0


def _line(text: str) -> str:
    return " ".join(text.split())
