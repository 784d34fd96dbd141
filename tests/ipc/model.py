"""What the stateful tests know of pools and clients, beside what the code says of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from hypothesis import strategies as st

from ipc.control import ControlMemory
from ipc.leases import Holder
from ipc.memory_shm import ReadOnlyRegion, SharedRegion
from ipc.offers import Offer
from ipc.pool import Pool
from ipc.shares import Share

NUM_WORDS = 5
T = TypeVar("T")


@dataclass(eq=False)
class Memory:
    """A pool with its memory as the writer and as a reader see it."""

    pool: Pool
    region: SharedRegion
    reader: ReadOnlyRegion


@dataclass(eq=False)
class Client:
    """A holder, the client's end of its control memory, and what the model knows of both."""

    holder: Holder
    words: ControlMemory
    held: list[Share] = field(default_factory=list)
    granted: list[Share] = field(default_factory=list)  # ever
    written: list[int] = field(default_factory=lambda: [0] * NUM_WORDS)
    seen: list[int] = field(default_factory=lambda: [0] * NUM_WORDS)
    offers: list[Offer] = field(default_factory=list)  # open ones
    num_strays: int = 0

    def granted_share(self, share: Share) -> None:
        """Check a new share, and remember it."""
        assert self.share_in(share.slot) is None
        assert (share.slot, share.generation) not in [(old.slot, old.generation) for old in self.granted]
        self.written[share.slot] = self.seen[share.slot] = 0
        self.held.append(share)
        self.granted.append(share)

    def write(self, slot: int, generation: int) -> None:
        self.words.acknowledge(slot, generation)
        self.written[slot] = generation

    def changed(self) -> list[int]:
        """The slots at which a sweep looks."""
        top = max((share.slot for share in self.granted), default=0)
        return [slot for slot in range(1, top + 1) if self.written[slot] != self.seen[slot]]

    def share_in(self, slot: int) -> Share | None:
        return next((share for share in self.held if share.slot == slot), None)


PICKS = st.sampled_from([0, 0, 0, 0, 1, 2, 3, 4])  # so that rules often meet at one extent


def pick(things: Sequence[T], index: int) -> T:
    """One of the latest of `things`."""
    return things[-1 - index % len(things)]
