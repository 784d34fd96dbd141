"""The contract of a tier: seven methods, all asynchronous; a miss is None and not an exception."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mmcache.keys import DIGEST_BYTES

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one value of each dtype that can be stored."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What a tier knows of one embedding.

    Attributes:
        key: the store key, 32 bytes: fingerprint, then content key.
        namespace: `keys.namespace_id` of the namespace that it belongs to, 8 bytes.
        shape: (tokens, dim).
        dtype: "float32", "bfloat16" or "float16".
        grid_thw: patches in time, height and width.
        nbytes: of the payload: tokens times dim times the dtype's size.
        checksum: `keys.checksum` of the payload.
        created_s: Unix time of the encoding.
        encode_seconds: what the encoding took.
    """

    key: bytes
    namespace: bytes
    shape: tuple[int, int]
    dtype: str
    grid_thw: tuple[int, int, int]
    nbytes: int
    checksum: int
    created_s: float
    encode_seconds: float


@dataclass(frozen=True, slots=True)
class Selection:
    """Which entries are meant: those for which everything holds that is given; all, if nothing is.

    Attributes:
        namespace: they belong to it (`keys.namespace_id`).
        fingerprint: they were made under it, 16 bytes.
        other_than: they were made under any other fingerprint than this.
        keys: their store keys are among these.
    """

    namespace: bytes | None = None
    fingerprint: bytes | None = None
    other_than: bytes | None = None
    keys: Collection[bytes] | None = None

    def has(self, entry: Entry) -> bool:
        """Whether an entry is meant."""
        return self.matches(entry.key, entry.namespace)

    def matches(self, key: bytes, namespace: bytes) -> bool:
        """Whether what has this store key and belongs to this namespace is meant."""
        made_under = key[:DIGEST_BYTES]
        return (
            self.namespace in {None, namespace}
            and self.fingerprint in {None, made_under}
            and self.other_than != made_under
            and (self.keys is None or key in self.keys)
        )


class Purged(NamedTuple):
    """What a selection came to: entries, and the bytes of their payloads."""

    num_entries: int
    nbytes: int


class TierError(Exception):
    """The tier as a whole could not do it: unreachable, full, broken. Never about one damaged entry."""


class LeftBehindError(TierError):
    """The tier was closed while the call hung. What it was given may still be read, until the process ends."""


class Tier(ABC):
    """One level of storage.

    Attributes:
        name: for counters and messages.
        counters: events since the start, and gauges; read and changed on the event loop only.
    """

    name: str

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()

    @abstractmethod
    async def find(self, keys: Sequence[bytes]) -> list[Entry | None]:
        """Look up many keys at once; None for each that is absent or whose record is damaged.

        Raises:
            TierError: the tier could not be asked.
        """

    @abstractmethod
    async def read(self, entry: Entry, into: memoryview) -> bool:
        """Copy the payload of an entry that `find` returned into the start of `into`, and verify it.

        Returns False when the entry is gone, replaced or damaged; a damaged one is counted and removed. `into` is the
        caller's, at least `entry.nbytes` bytes; its content is undefined unless the result is True. However the call
        ends, also by cancellation, nothing writes to `into` afterwards.

        Raises:
            TierError: the tier could not be read.
        """

    @abstractmethod
    async def put(self, entry: Entry, payload: memoryview) -> None:
        """Store an entry whole or not at all. What is already there under the key may stay, or be replaced.

        `payload` is the caller's and must not change during the call. However the call ends, nothing reads it
        afterwards; a cancelled call therefore ends late.

        Raises:
            LeftBehindError: the tier was closed meanwhile and could not wait: `payload` must never change from now on.
            TierError: it was not stored.
        """

    @abstractmethod
    async def remove(self, keys: Sequence[bytes]) -> None:
        """Remove entries; absent ones are no error.

        Raises:
            TierError: some may still be there.
        """

    async def purge(self, selection: Selection, *, is_dry_run: bool = False) -> Purged:  # noqa: ARG002  # a default
        """Remove every entry that is meant, or only count them. Those that are put meanwhile may stay.

        It may take long, and lets other calls of the tier go on meanwhile. What is damaged on its way is counted and
        removed like any damaged entry. A tier that does not say otherwise cannot do it, and raises.

        Raises:
            TierError: some may still be there.
        """
        raise TierError(f"the {self.name} tier cannot be purged")

    @abstractmethod
    async def close(self, timeout_s: float) -> bool:
        """Finish what runs, within the time, and give up every resource. Closing twice is harmless.

        False when something hung: it is left behind, without keeping the interpreter from its exit, and calls that
        still wait for it end with LeftBehindError.
        """
