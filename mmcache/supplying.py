"""Bytes that the sidecar asks a client for: read and copied into memfds, in whichever thread, then sent by the core."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ipc.errors import IpcError
from ipc.memory_shm import sealed_copy
from mmcache.errors import ItemError, UnreadableItem
from mmcache.framing import Kind, OutgoingFrame, pack_frame
from mmcache.media import Media
from mmcache.pending import PendingEncode
from mmcache.protocol import Supply
from mmcache.records import SUPPLY_WINDOW

if TYPE_CHECKING:
    from mmcache.core import ClientCore

MAX_SUPPLY_BYTES = 256 << 20
"""One memfd carries up to this many bytes, or one item."""


class Supplying:
    """What one frame asks for.

    Attributes:
        pending: the request that it is asked for.
        need: positions whose bytes are needed.
        verify: others, whose bytes are asked for to check what was served.
        frames: to send, once `prepare` is done.
        failed: positions that cannot be sent, and why.
    """

    def __init__(self, pending: PendingEncode, need: Sequence[int], verify: Sequence[int]) -> None:
        self.pending = pending
        self.frames: list[OutgoingFrame] = []
        self.failed: list[tuple[int, ItemError]] = []
        self.need = need
        self.verify = verify[:SUPPLY_WINDOW]

    @property
    def items(self) -> list[object]:
        """What the user gave at the positions that are asked for."""
        return [self.pending.part.item(position) for position in (*self.need, *self.verify)]

    def prepare(self) -> None:
        """Read and copy. Touches nothing of the core."""
        batch: list[tuple[int, Media]] = []
        nbytes = 0
        for position in self.need:
            try:
                media = self.pending.part.media(position)
            except ItemError as error:
                self.failed.append((position, error))
                continue
            if batch and nbytes + media.nbytes > MAX_SUPPLY_BYTES:
                self._pack(batch)
                batch, nbytes = [], 0
            batch.append((position, media))
            nbytes += media.nbytes
        if batch:
            self._pack(batch)
        for position in self.verify:  # a memfd each; one that cannot be sent is left out
            with suppress(IpcError, ItemError):
                self.frames.append(_frame(self.pending, [(position, self.pending.part.media(position))]))

    def discard(self) -> None:
        """Nobody wants them any more."""
        for frame in self.frames:
            frame.discard()

    def _pack(self, batch: Sequence[tuple[int, Media]]) -> None:
        try:
            self.frames.append(_frame(self.pending, batch))
        except IpcError as error:
            reason = UnreadableItem(f"cannot be sent: {error}")
            self.failed += [(position, reason) for position, _ in batch]


def supply_now(core: ClientCore, supplying: Supplying) -> None:
    """Prepare and send at once."""
    supplying.prepare()
    core.supplied(supplying)


def _frame(pending: PendingEncode, batch: Sequence[tuple[int, Media]]) -> OutgoingFrame:
    """The bytes of some items in one memfd. Raises `IpcError` if there is none to be had."""
    media = [item for _, item in batch]
    fd, offsets = sealed_copy("mmcache-supply", [item.raw for item in media])
    supply = Supply(
        request_id=pending.request_id, positions=[position for position, _ in batch],
        kinds=[item.kind for item in media], headers=[item.header for item in media], offsets=offsets,
        sizes=[item.nbytes for item in media],
    )  # fmt: skip
    return pack_frame(Kind.SUPPLY, supply, fds=[fd], owned=True)
