"""The client: items in, leases out. One core without I/O (core.py), and the faces that move its frames."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self, cast

from mmcache.core import ClientCore, PendingEncode
from mmcache.errors import (
    ClientClosed,
    ConnectionLost,
    EncodeError,
    ItemError,
    ProtocolError,
    RequestTimeout,
)
from mmcache.handshake import connected, shake_hands
from mmcache.keys import ContentKey, Fingerprint
from mmcache.lease import Lease
from mmcache.media import describe
from mmcache.parts import cut, is_one_item
from mmcache.paths import default_socket
from mmcache.transport import BlockingChannel
from mmcache.turns import Turns

__all__ = ["Client", "Lease", "connect"]

DEFAULT_TIMEOUT_S = 60.0
MAX_TIMEOUT_S = 1_000_000
WINDOW_BYTES = 256 << 20
WINDOW_PARTS = 32
"""Items are read and hashed this far ahead of the answers, so that a long list of files is never in memory at once."""
SPIN_S = 300e-6
"""A call polls this long for its answer before it sleeps; an answer from the pool comes sooner."""
SERVER_MARGIN_S = 0.25
"""The sidecar is told to give up this much before the client does, so that its error says more than a timeout."""

Item = Any
"""bytes, a path (str or Path), a PIL image, or a uint8 numpy array or CPU tensor of any memory layout: H×W×3 (RGB), H×W
(gray: the same in each channel) or T×H×W×3 (a video chunk, of up to 4 frames for Kimi-K2.5)."""


def connect(
    socket: str | os.PathLike[str] | None = None,
    *,
    timeout: float = DEFAULT_TIMEOUT_S,
    namespace: str = "",
    name: str | None = None,
) -> Client:
    """Connect to a sidecar.

    Args:
        socket: its socket; by default `MMCACHE_SOCKET`, else where `mmcache serve` puts it by default.
        timeout: bound of each call in seconds, of connecting too.
        namespace: tenant; part of every key.
        name: what operators see this client as; by default the program's name.

    Raises:
        SidecarUnavailable: nobody listens there.
        ProtocolMismatch: the sidecar speaks another protocol version.
    """
    return Client(socket, timeout=timeout, namespace=namespace, name=name)


class Client:
    """A connection to a sidecar. A context manager; see `connect` for its arguments.

    Threads may share a client; their calls take turns. A forked child must not use it: it connects anew.
    """

    def __init__(
        self,
        socket: str | os.PathLike[str] | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        namespace: str = "",
        name: str | None = None,
    ) -> None:
        if not 0 < timeout <= MAX_TIMEOUT_S:
            raise ValueError(f"timeout must be positive and at most {MAX_TIMEOUT_S} seconds, got {timeout}")
        self._path = Path(socket) if socket is not None else default_socket(os.environ)
        self._timeout_s = timeout
        self._pid = os.getpid()
        self._turns = Turns()
        self._lost: str | None = None
        self._is_closed = False
        deadline = time.monotonic() + timeout
        self._channel = BlockingChannel(connected(self._path, deadline), spin_s=SPIN_S)
        name = name or Path(sys.argv[0] or "python").name
        try:
            welcome, control_fd = shake_hands(self._channel, self._path, name, namespace, deadline)
        except BaseException:
            self._channel.close()
            raise
        self._core = ClientCore(welcome, control_fd, namespace)

    @property
    def fingerprint(self) -> Fingerprint:
        """What decides an embedding besides its content: weights, config, processor settings, dtype, numerics.

        As the sidecar said last: of another client's reload this one hears with its next call. What an embedding in
        hand is of, its lease says.
        """
        return Fingerprint.from_hex(self._core.served.fingerprint)

    @property
    def dim(self) -> int:
        """Width of an embedding row."""
        return self._core.served.dim

    @property
    def dtype(self) -> str:
        """Of the embeddings: "float32" or "bfloat16"."""
        return self._core.served.dtype

    def key(self, item: Item) -> ContentKey:
        """The content key of one item. No round trip. Raises the ItemError of a bad item."""
        media = describe(item, 0, self._core.welcome.max_item_bytes)
        return self._core.hasher.key(media.kind, media.header, media.raw)

    def encode(self, items: Sequence[Item], errors: Literal["raise", "return"] = "raise") -> list[Lease]:
        """A lease for every item, in their order; every position has a lease of its own, repeats too.

        One round trip if the sidecar has everything in its pool, two if it asks for bytes.

        Args:
            items: each `bytes`, a path, a PIL image, or a uint8 numpy array or CPU tensor, H×W×3, H×W or, for a video
                chunk, T×H×W×3. A chunk has one embedding, with the tokens of one frame; `max_pixels` bounds its frames
                together. Arrays have keys of their own for each shape, so a chunk of one frame is not that frame.
            errors: "raise" throws one `EncodeError` once the rest is done, with leases and errors in `.results`;
                "return" puts the exception objects in place.

        Raises:
            EncodeError: some items failed, with `errors="raise"`.
            RequestTimeout, ConnectionLost, ClientClosed: the call as a whole failed; it holds no leases.
        """
        if errors not in ("raise", "return"):
            raise ValueError(f'errors must be "raise" or "return", got {errors!r}')
        if is_one_item(items):
            what = type(items).__name__
            raise TypeError(f"items must be a list of items; for one {what} give [item], for a batch list(batch)")
        items = list(items)
        results: list[Lease | ItemError | None] = [None] * len(items)
        with self._call() as deadline:
            self._encode(items, results, deadline)
        settled = cast("list[Lease | ItemError]", results)
        if errors == "raise" and any(isinstance(result, ItemError) for result in settled):
            raise EncodeError(settled)
        return cast("list[Lease]", settled)

    def stats(self) -> dict[str, Any]:
        """The sidecar's counters, nested. One round trip."""
        with self._call() as deadline:
            self._core.ask_stats()
            self._exchange(lambda: self._core.stats_reply is not None, deadline)
            return cast("dict[str, Any]", json.loads(self._core.stats_reply or b"{}"))

    def reload(self, model: str | os.PathLike[str] | None = None) -> Fingerprint:
        """Serve new weights, without losing a request; returns their fingerprint.

        The ranks load them beside the old ones, which are served until then: each has both in memory for a while. After
        the call every embedding is of the new weights. Entries of the old ones are no longer found; leases on them stay
        valid. With the same weights nothing changes. dtype and settings stay as the sidecar was started. A call that
        times out leaves the reload going on.

        Args:
            model: a preset or a checkpoint folder; by default the one that is served, read anew.

        Raises:
            ConfigError, CheckpointError, SidecarError: why it cannot be served; all is as it was before.
            RequestTimeout, ConnectionLost, ClientClosed: the call failed.
        """
        name = os.fspath(model) if model is not None else ""
        with self._call() as deadline:
            self._core.ask_reload(name, os.path.abspath(os.path.expanduser(name)) if name else "")
            self._exchange(lambda: self._core.reload_reply is not None, deadline)
        self._core.check_reload()
        return self.fingerprint

    def close(self) -> None:
        """Acknowledge every lease but held ones, and close the connection. Twice is harmless.

        Held tensors stay valid and acknowledge when they die.
        """
        if self._is_closed or os.getpid() != self._pid:
            return
        with self._turns.lock:  # in the middle of this thread's own call too
            self._is_closed = True
            try:
                self._core.release_all()
                if self._lost is None:
                    self._say_goodbye()
            finally:
                self._channel.close()
                self._core.forget_pools()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_core", None) is not None:
            self._channel.close()

    def _encode(self, items: Sequence[Item], results: list[Lease | ItemError | None], deadline: float) -> None:
        """Ask for each part as soon as it is hashed; wait at the end, and when a window is full."""
        pending: list[PendingEncode] = []
        num_asked = nbytes = 0
        try:
            for part in cut(items, self._core.hasher.key, self._core.welcome.max_item_bytes, results.__setitem__):
                remaining = deadline - time.monotonic()
                margin = min(SERVER_MARGIN_S, remaining / 4)
                pending.append(self._core.encode(part, max(0.0, remaining - margin)))
                self._send_outbox(deadline)
                num_asked, nbytes = num_asked + 1, nbytes + part.nbytes
                if nbytes >= WINDOW_BYTES or num_asked == WINDOW_PARTS:
                    self._exchange(lambda: all(request.is_done for request in pending), deadline)
                    num_asked = nbytes = 0
            self._exchange(lambda: all(request.is_done for request in pending), deadline)
        except BaseException:
            for request in pending:
                self._core.cancel(request)
            if self._lost is None:
                with contextlib.suppress(RequestTimeout, ConnectionLost):
                    self._send_outbox(time.monotonic() + 0.1)
            raise
        for request in pending:
            for place, result in zip(request.places, request.results, strict=True):
                results[place] = result

    @contextlib.contextmanager
    def _call(self) -> Iterator[float]:
        """One thread's turn; gives its deadline."""
        self._check_usable()
        with self._turns.taken(self._timeout_s) as deadline:
            self._check_usable()
            yield deadline

    def _exchange(self, is_done: Callable[[], bool], deadline: float) -> None:
        """Send what waits and receive until `is_done`."""
        self._send_outbox(deadline)
        while not is_done():
            try:
                self._core.receive(self._channel.receive(deadline))
            except TimeoutError:
                raise RequestTimeout(f"no answer from {self._path} within {self._timeout_s:g} s") from None
            except (ConnectionLost, ProtocolError) as error:
                raise self._lose(str(error)) from error
            except BaseException:
                # What was read may be lost with the interruption. The leases stay, and acknowledge without the socket.
                self._say_goodbye()
                self._lose("a call was interrupted")
                raise
            if self._core.outbox:
                self._send_outbox(deadline)

    def _send_outbox(self, deadline: float) -> None:
        outbox = self._core.outbox
        while outbox:
            try:
                self._channel.send(outbox.popleft(), deadline)
            except ConnectionLost as error:
                raise self._lose(str(error)) from error
            except BaseException as error:
                # A frame may have gone in part: the stream is of no use any more.
                self._lose("a call ended while sending")
                if isinstance(error, TimeoutError):
                    raise RequestTimeout(f"{self._path} took nothing within {self._timeout_s:g} s") from None
                raise

    def _say_goodbye(self) -> None:
        """Tell which leases go on. If it fails, the coordinator learns the rest from this process's death."""
        self._core.say_goodbye()
        with contextlib.suppress(RequestTimeout, ConnectionLost):
            self._send_outbox(time.monotonic() + 1.0)

    def _lose(self, reason: str) -> ConnectionLost:
        self._lost = reason
        self._channel.close()
        for frame in self._core.outbox:
            frame.discard()
        self._core.outbox.clear()
        self._core.forget_pools()
        return ConnectionLost(f"the sidecar at {self._path} went away: {reason}; connect again")

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ClientClosed("this client belongs to the process that opened it; connect anew after a fork")
        if self._is_closed:
            raise ClientClosed("the client is closed")
        if self._lost is not None:
            raise ConnectionLost(f"the sidecar at {self._path} went away: {self._lost}; connect again")
