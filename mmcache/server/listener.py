"""The sidecar's socket: one owner at a time, nothing left by a killed one, and only its own user let in."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

from mmcache.errors import ConfigError, SidecarRunning, SidecarUnavailable
from mmcache.framing import Kind, pack_frame
from mmcache.protocol import Refused
from mmcache.transport import peer_of

log = logging.getLogger(__name__)

BACKLOG = 256


class Listener:
    """Claims a socket's path at once, listens on it later, and removes it at the end.

    The claim is a lock on `PATH.lock`, which the kernel gives back when its holder dies in whatever way.

    Raises (constructor):
        SidecarRunning: a live sidecar has the path.
        ConfigError: the path cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_path = path.with_name(path.name + ".lock")
        self._socket: socket.socket | None = None
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = self._locked()
            self._remove_stale()
        except OSError as error:
            raise ConfigError(f"socket = {path}: cannot be used: {error.strerror}") from error

    def listen(self) -> None:
        """Bind and listen: from now on clients are queued."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        umask = os.umask(0o177)
        try:
            self._socket.bind(os.fspath(self.path))
        finally:
            os.umask(umask)
        self._socket.setblocking(False)
        self._socket.listen(BACKLOG)

    @property
    def is_listening(self) -> bool:
        """Whether clients are queued."""
        return self._socket is not None

    def fileno(self) -> int:
        """Descriptor to wait on for clients."""
        assert self._socket is not None, "it listens"
        return self._socket.fileno()

    def accept(self, take: Callable[[socket.socket], None]) -> bool:
        """Hand every waiting client of this user to `take`; refuse others. False when it could not accept one."""
        assert self._socket is not None, "it listens"
        while True:
            try:
                client, _ = self._socket.accept()
            except BlockingIOError:
                return True
            except OSError as error:
                log.error("a client could not be accepted: %s", error.strerror)
                return False
            _, uid = peer_of(client)
            if uid == os.geteuid():
                take(client)
            else:
                log.warning("refused a connection of user %d", uid)
                _refuse(client, f"only user {os.geteuid()} may connect, not {uid}")

    def stop(self) -> None:
        """Stop listening and remove the socket; the claim stays. Twice is harmless."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()

    def close(self) -> None:
        """Stop, and give the claim up. Twice is harmless."""
        self.stop()
        if self._lock >= 0:
            with contextlib.suppress(FileNotFoundError):
                self._lock_path.unlink()
            os.close(self._lock)
            self._lock = -1

    def _locked(self) -> int:
        while True:
            fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                raise SidecarRunning(f"another sidecar runs on {self.path}; stop it, or give --socket") from None
            # Its last owner may have removed the file between the two calls above.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), self._lock_path.stat()):
                    return fd
            os.close(fd)

    def _remove_stale(self) -> None:
        """Remove the socket of a killed sidecar; whoever holds the lock is the only one to do so."""
        try:
            mode = self.path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise ConfigError(f"socket = {self.path}: exists and is not a socket; remove it, or give --socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(os.fspath(self.path))
            except ConnectionRefusedError:
                self.path.unlink()
                return
        raise SidecarRunning(f"something listens on {self.path}; stop it, or give --socket")


def _refuse(client: socket.socket, reason: str) -> None:
    with client:
        refused = Refused(error=SidecarUnavailable.__name__, reason=reason)
        with contextlib.suppress(OSError):
            client.send(pack_frame(Kind.REFUSED, refused).data)
