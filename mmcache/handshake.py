"""The first two frames of a connection, seen from the client."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from pathlib import Path
from typing import NamedTuple

from mmcache._version import __version__
from mmcache.device_memory import checked_ordinal
from mmcache.errors import ConnectionLost, ProtocolError, ProtocolMismatch, RequestTimeout, SidecarUnavailable
from mmcache.foreign import ForeignModel
from mmcache.framing import Frame, Kind, OutgoingFrame, close_all, pack_frame, parse
from mmcache.paths import default_socket
from mmcache.protocol import PROTOCOL_VERSION, Foreign, Hello, Refused, Welcome
from mmcache.transport import BlockingChannel, take_descriptors

DEFAULT_TIMEOUT_S = 60.0
MAX_TIMEOUT_S = 1_000_000


def check_timeout(timeout: float) -> None:
    """Raise ValueError unless a user's timeout is one."""
    if not 0 < timeout <= MAX_TIMEOUT_S:
        raise ValueError(f"timeout must be positive and at most {MAX_TIMEOUT_S} seconds, got {timeout}")


class Target(NamedTuple):
    """What a client connects to, and as whom.

    Attributes:
        path: the sidecar's socket.
        name: what operators see the client as.
        namespace: part of its keys.
        ordinal: the device on which it reads, in its own process; None for that of the pool.
        foreign: the model that all it asks for is of; None for the one that is served.
    """

    path: Path
    name: str
    namespace: str
    ordinal: int | None = None
    foreign: ForeignModel | None = None

    @classmethod
    def of(
        cls, socket: str | os.PathLike[str] | None, name: str | None, namespace: str, device: object = None,
        foreign: ForeignModel | None = None,
    ) -> Target:  # fmt: skip
        """As a user says it; see `Client`. Raises ValueError if `device` is none."""
        path = Path(socket) if socket is not None else default_socket(os.environ)
        if foreign is not None:
            foreign = ForeignModel.of(*foreign)
        return cls(path, name or Path(sys.argv[0] or "python").name, namespace, checked_ordinal(device), foreign)


def connected(path: Path, deadline: float) -> socket.socket:
    """A socket connected to the sidecar at `path`. Raises `SidecarUnavailable`, which says why and what to do."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        sock.connect(os.fspath(path))
    except OSError as error:
        sock.close()
        raise unavailable(path, error) from error
    return sock


def unavailable(path: Path, error: OSError) -> SidecarUnavailable:
    """Why a socket cannot be connected, and what to do."""
    reasons = {
        FileNotFoundError: "no such socket",
        ConnectionRefusedError: "nobody listens there any more",
        PermissionError: "not permitted; only the user that runs the sidecar may connect",
    }
    why = next((reason for kind, reason in reasons.items() if isinstance(error, kind)), str(error))
    return SidecarUnavailable(f"no sidecar at {path}: {why}; start one with `mmcache serve --socket {path}`")


def shake_hands(
    channel: BlockingChannel, path: Path, name: str, namespace: str, deadline: float,
    foreign: ForeignModel | None = None,
) -> tuple[Welcome, int]:  # fmt: skip
    """Say who this is; return the sidecar's answer and the descriptor of the control memory, the caller's from now on.

    Raises:
        SidecarUnavailable, ProtocolMismatch, ProtocolError: it refused, closed, or speaks otherwise.
        RequestTimeout: it did not answer.
    """
    try:
        # A sidecar that refuses may have closed already; what it said first is still there to be read.
        with contextlib.suppress(ConnectionLost):
            channel.send(hello(name, namespace, foreign), deadline)
        return welcomed(channel.receive(deadline), foreign)
    except TimeoutError:
        raise RequestTimeout(f"{path} did not answer the handshake in time") from None
    except ConnectionLost as error:
        raise SidecarUnavailable(f"{path} closed the connection: {error}") from error


def hello(name: str, namespace: str, foreign: ForeignModel | None = None) -> OutgoingFrame:
    """A client's first frame."""
    message = Hello(
        protocol=PROTOCOL_VERSION, version=__version__, name=name[:128], namespace=namespace,
        foreign=None if foreign is None else Foreign(fingerprint=bytes(foreign.fingerprint), dtype=foreign.dtype),  # type: ignore[arg-type]
    )  # fmt: skip
    return pack_frame(Kind.HELLO, message, fds=[os.pidfd_open(os.getpid())], owned=True)


def welcomed(frame: Frame, foreign: ForeignModel | None = None) -> tuple[Welcome, int]:
    """The sidecar's first frame: its answer, and the descriptor of the control memory. Raises as `shake_hands` does."""
    if frame.kind == Kind.REFUSED:
        close_all(frame.fds)
        refused = parse(Refused, frame)
        kind = {"ProtocolMismatch": ProtocolMismatch, "ProtocolError": ProtocolError}.get(refused.error)
        raise (kind or SidecarUnavailable)(refused.reason)
    if frame.kind != Kind.WELCOME:
        close_all(frame.fds)
        raise ProtocolError(f"frame of kind {frame.kind} where WELCOME belongs")
    (control_fd,) = take_descriptors(frame, 1)
    welcome = parse(Welcome, frame)
    if foreign is not None and welcome.foreign != str(foreign.fingerprint):
        os.close(control_fd)
        raise ProtocolMismatch(f"this sidecar ({welcome.version}) keeps no foreign embeddings; it needs {__version__}")
    return welcome, control_fd
