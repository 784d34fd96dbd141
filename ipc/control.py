"""Control memory: one memfd a connection, in which its client says "my last read is done".

One uint32 word a share. The coordinator gives a share a word and a generation; the client stores the generation into
the word after its last read; the coordinator reads the words in passing. No system call on either side. Word 0 is
never granted, so a slot of 0 can mean "none".
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Self

import numpy as np

from ipc.errors import OutOfBounds
from ipc.memory_shm import SEAL_GROW, SEAL_SHRINK, SharedRegion, check_sealed

if TYPE_CHECKING:
    from numpy.typing import NDArray

WORD_BYTES = 4
GENERATION_MAX = 2**32 - 1


class ControlMemory:
    """The words of one connection, mapped by its client and by the coordinator.

    Attributes:
        num_words: words in use, the reserved word 0 included.
        words, scalars: all of them, as an array and as a memoryview, which is quicker for one.
        store_is_ordered: whether a plain store stays behind earlier loads on this processor. Where it is False, a
            client acknowledges by a message instead, whose system call orders.
    """

    __slots__ = ("_region", "num_words", "scalars", "store_is_ordered", "words")

    def __init__(self, region: SharedRegion, num_words: int) -> None:
        """Use `create` or `attach`. Takes ownership of `region`."""
        array = region.array(0, num_words * WORD_BYTES).view(np.uint32)
        self._region = region
        self.scalars = array.data
        self.num_words = num_words
        self.words: NDArray[np.uint32] = array
        self.store_is_ordered = platform.machine() == "x86_64"

    @classmethod
    def create(cls, num_words: int) -> Self:
        """Coordinator: a new memory of zeroed words, sealed against resizing. Allows `num_words - 1` shares."""
        if num_words < 2:
            raise OutOfBounds(f"control memory: num_words must be at least 2 (word 0 is reserved), got {num_words}")
        region = SharedRegion.create("ipc-control", num_words * WORD_BYTES)
        region.seal_resize()
        return cls(region, num_words)

    @classmethod
    def attach(cls, fd: int) -> Self:
        """Client: map a received memory. `fd` stays the caller's. `num_words` is what the whole pages hold."""
        nbytes = check_sealed(fd, SEAL_SHRINK | SEAL_GROW)
        return cls(SharedRegion.attach(fd, nbytes), nbytes // WORD_BYTES)

    @property
    def fd(self) -> int:
        """The memory's descriptor, to be passed to the client; valid until `close()`."""
        return self._region.fd

    def acknowledge(self, slot: int, generation: int) -> None:
        """Client: say that the last read under this share is done. One aligned 4-byte store, once a share.

        The caller has finished reading: on a processor with `store_is_ordered` loads that come before this call in its
        program happen before the store.
        """
        if not 0 < slot < self.num_words:
            raise OutOfBounds(f"slot {slot} is not one of 1..{self.num_words - 1}")
        self.scalars[slot] = generation

    def read(self, slot: int) -> int:
        """Coordinator: the word of `slot` as it is now."""
        return self.scalars[slot]

    def acknowledged(self, seen: NDArray[np.uint32]) -> list[int]:
        """Coordinator: the slots below `len(seen)` whose words differ from `seen`. A few µs for thousands of words."""
        words = self.words[: len(seen)]
        slots: list[int] = np.flatnonzero(words != seen).tolist()
        return slots

    def close(self) -> None:
        """Unmap the words and close the descriptor. The memory must not be used afterwards. Twice is harmless."""
        self.scalars.release()
        self.words = self.words[:0].copy()
        self._region.close()
