"""A sidecar with too much queued, as far as a client can tell: it refuses keys as a test says, and grants the rest."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from ipc.control import ControlMemory
from ipc.memory_shm import SharedRegion
from mmcache.errors import ConnectionLost
from mmcache.framing import Frame, Kind, close_all, pack_frame, parse
from mmcache.protocol import PROTOCOL_VERSION, Cancel, PoolAdded, Unsettled, Welcome
from mmcache.records import GRANT, KEY_BYTES, RESULTS_HEAD, EncodeFrame, parse_encode
from mmcache.transport import BlockingChannel

HINT_S = 0.02
DIM = 4


class Asked(NamedTuple):
    """One ENCODE as it came."""

    frame: EncodeFrame
    keys: list[bytes]


class RefusingSidecar:
    """Listens in `folder` for one client. A context manager.

    Args:
        refuses: whether a key that was asked for so many times before is refused now.
        hint_s: when it says to come again.

    Attributes:
        asked: what came, in order. cancelled: requests that were.
        control: memory in which the client acknowledges.
    """

    def __init__(self, folder: Path, refuses: Callable[[bytes, int], bool], hint_s: float = HINT_S) -> None:
        self.path = folder / "refusing.sock"
        self.asked: list[Asked] = []
        self.cancelled: list[int] = []
        self.control = ControlMemory.create(1024)
        self._refuses = refuses
        self._hint_s = hint_s
        self._times: Counter[bytes] = Counter()
        self._num_grants = 0
        self._pool = SharedRegion.create("refusing-pool", 4096)
        self._pool.array(0, 4 * DIM).view(np.float32)[:] = range(DIM)
        self._pool.seal_for_readers()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)

    def times(self, key: bytes) -> int:
        """How often a key was asked for."""
        return self._times[key]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # a test whose client never came
        self._thread.join()
        self._listener.close()
        self.control.close()
        self._pool.close()

    def _serve(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        channel = BlockingChannel(sock)
        with contextlib.suppress(ConnectionLost):
            close_all(channel.receive().fds)
            channel.send(pack_frame(Kind.WELCOME, _welcome(), fds=[self.control.fd]))
            channel.send(pack_frame(Kind.POOL_ADDED, PoolAdded(pool_id=1, nbytes=4096), fds=[self._pool.fd]))
            while True:
                self._on_frame(channel, channel.receive())
        channel.close()

    def _on_frame(self, channel: BlockingChannel, frame: Frame) -> None:
        close_all(frame.fds)
        if frame.kind == Kind.CANCEL:
            self.cancelled.append(parse(Cancel, frame).request_id)
        if frame.kind != Kind.ENCODE:
            return
        encode = parse_encode(frame)
        keys = [encode.keys[start : start + KEY_BYTES] for start in range(0, len(encode.keys), KEY_BYTES)]
        self.asked.append(Asked(encode, keys))
        refused = [place for place, key in enumerate(keys) if self._refuses(key, self._times[key])]
        self._times.update(keys)
        grants = [self._grant(place) for place in range(len(keys)) if place not in refused]
        more = None
        if refused:
            more = Unsettled(
                failed=refused, errors=["Overloaded"] * len(refused), reasons=["16384 items are queued"] * len(refused),
                retry_after_s=self._hint_s,
            )  # fmt: skip
        channel.send(pack_frame(Kind.RESULTS, more, RESULTS_HEAD.pack(encode.request_id) + b"".join(grants)))

    def _grant(self, place: int) -> bytes:
        self._num_grants += 1
        return GRANT.pack(place, self._num_grants, 1, 0, 1, 1, 0, 4 * DIM, 1, 2, 2)


def _welcome() -> Welcome:
    return Welcome(
        protocol=PROTOCOL_VERSION, version="0", seed=1, fingerprint="00" * 16, model="test", dtype="float32", dim=DIM,
        control_words=1024, max_item_bytes=1 << 20, max_pixels=1 << 20, orientation="exif", processor="{}",
    )  # fmt: skip
