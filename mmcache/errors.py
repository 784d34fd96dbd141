"""Every exception that mmcache raises, on purpose, to its user. Each has an id, and a section of docs/errors.md.

MMCacheError
├── ConfigError              a setting is wrong (names the setting, its source and the rule)
├── CheckpointError          a model cannot be loaded (also encoder.errors.CheckpointError)
├── SidecarError             the sidecar as a whole
│   ├── SidecarUnavailable   nobody listens on the socket, or it refused us
│   ├── SidecarRunning       another live sidecar holds the socket
│   ├── ProtocolError        a frame broke the protocol
│   │   └── ProtocolMismatch the two ends speak different protocol versions
│   └── ConnectionLost       the sidecar went away during or before a call (also ConnectionError)
├── RequestCancelled         the call was cancelled by its handle
├── RequestTimeout           a call outlived its timeout (also TimeoutError)
├── ClientClosed             the client was closed, or is used in a forked child or inside its own call
├── LeaseReleased            a lease was used after its release
├── DeviceUnavailable        an embedding is in the memory of a CUDA device that this process cannot use
├── CapturingError           something cannot be done on a stream that is being captured into a CUDA graph
├── EncodeError              some items of a request failed; `.results` holds leases and errors in order
└── ItemError                one item failed; names its index, its source and the reason
    ├── UnreadableItem       the path is missing, a folder, or may not be read
    ├── UnsupportedItem      not a kind of item, or an array of the wrong dtype or shape
    ├── UndecodableImage     not a picture, truncated or damaged
    ├── UnsupportedMode      a picture whose mode has no defined conversion to RGB
    ├── ImageTooLarge        beyond the limit of bytes or pixels
    ├── ContentMismatch      the bytes do not hash to the key that was sent
    ├── NonFiniteEmbedding   the encoder produced NaN or Inf
    ├── EncodeFailed         the ranks failed to encode it
    ├── NoRanks              no rank is alive that could encode it
    ├── Overloaded           the sidecar has as much queued as it takes; try again after `retry_after_s`
    ├── PoolExhausted        no room within the deadline, or ever (also ipc.errors.ExtentTooLarge's case)
    ├── TooManyLeases        the connection holds as many leases as its control memory has words
    ├── TooManyRequests      the connection has as many requests open as it may
    ├── NotCached            only its key was given, and no tier has its embedding
    ├── SliceGone            a reference is over: claimed by all, cancelled, or its maker has died
    ├── StagingExhausted     no room for pixels within the deadline, or ever
    ├── WrongEmbedding       an embedding given to `put` does not fit the model that is served
    └── DeadlineExceeded     the request's deadline passed before this item was done
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from encoder.errors import CheckpointError as EncoderCheckpointError

if TYPE_CHECKING:
    from mmcache.client import Lease


class MMCacheError(Exception):
    """Base of everything mmcache raises on purpose.

    Attributes:
        code: its id, at the end of its message too. docs/errors.md has what it means and what to do.
    """

    code: ClassVar[str] = "MMC100"

    def __init_subclass__(cls, *, code: str = "", **options: Any) -> None:
        """`code`: its id; without one it has that of what it is derived from."""
        super().__init_subclass__(**options)
        cls.code = code or cls.code

    def __str__(self) -> str:
        text, shown = super().__str__(), f"[{self.code}]"
        return text if text.endswith(shown) else f"{text} {shown}".lstrip()  # it came from the other end with its id


class ConfigError(MMCacheError, code="MMC101"):
    """A setting is wrong. The message names the setting, where it came from, and the rule."""


class CheckpointError(MMCacheError, EncoderCheckpointError, code="MMC102"):
    """A model cannot be loaded."""


class SidecarError(MMCacheError, code="MMC200"):
    """The sidecar as a whole cannot serve."""


class SidecarUnavailable(SidecarError, code="MMC201"):
    """Nobody listens on the socket, or the sidecar refused the connection."""


class SidecarRunning(SidecarError, code="MMC202"):
    """Another live sidecar holds the socket."""


class ProtocolError(SidecarError, code="MMC203"):
    """A frame broke the protocol."""


class ProtocolMismatch(ProtocolError, code="MMC204"):
    """The two ends speak different protocol versions."""


class ConnectionLost(SidecarError, ConnectionError, code="MMC205"):
    """The sidecar went away. Leases already held stay readable."""


class RequestTimeout(MMCacheError, TimeoutError, code="MMC301"):
    """A call outlived its timeout. Whatever arrives for it later is released at once."""


class RequestCancelled(MMCacheError, code="MMC302"):
    """The call was cancelled by its handle."""


class ClientClosed(MMCacheError, code="MMC303"):
    """The client was closed, or is used where it must not be: in a forked child, or inside one of its own calls."""


class LeaseReleased(MMCacheError, code="MMC304"):
    """A lease was used after its release."""


def _shortened(source: str) -> str:
    return source if len(source) <= 200 else f"{source[:120]}...{source[-60:]}"


class ItemError(MMCacheError, code="MMC400"):
    """One item of a request failed; the others are not touched by it.

    Attributes:
        index: position in the request, or None outside of one.
        source: the item as the user named it (a path, "bytes", "array 4x4x3", ...).
        reason: what was wrong and which rule it broke.
    """

    def __init__(self, reason: str, *, index: int | None = None, source: str = "") -> None:
        place = "" if index is None else f"item {index}"
        place += f" ({_shortened(source)})" if source else ""
        super().__init__(f"{place}: {reason}" if place else reason)
        self.reason = reason
        self.index = index
        self.source = source


class UnreadableItem(ItemError, code="MMC401"):
    """The path is missing, a folder, or may not be read."""


class UnsupportedItem(ItemError, code="MMC402"):
    """Not a kind of item, or an array of the wrong dtype or shape."""


class UndecodableImage(ItemError, code="MMC403"):
    """Not a picture, truncated or damaged."""


class UnsupportedMode(ItemError, code="MMC404"):
    """A picture whose mode has no defined conversion to RGB."""


class ImageTooLarge(ItemError, code="MMC405"):
    """Beyond the limit of bytes or pixels."""


class ContentMismatch(ItemError, code="MMC406"):
    """The bytes do not hash to the key that was sent."""


class NonFiniteEmbedding(ItemError, code="MMC407"):
    """The encoder produced NaN or Inf; nothing was cached."""


class EncodeFailed(ItemError, code="MMC408"):
    """The ranks failed to encode the item."""


class NoRanks(ItemError, code="MMC409"):
    """No rank is alive that could encode it. What is cached is still served."""


class Overloaded(ItemError, code="MMC410"):
    """The sidecar has as much queued as it takes; try again after `retry_after_s`.

    Attributes:
        retry_after_s: seconds until there should be room, as the sidecar predicts; 0 if it does not know.
    """

    def __init__(self, reason: str, retry_after_s: float = 0.0, *, index: int | None = None, source: str = "") -> None:
        super().__init__(reason, index=index, source=source)
        self.retry_after_s = retry_after_s


class PoolExhausted(ItemError, code="MMC411"):
    """No room in the pool within the deadline, or an embedding larger than the pool."""


class TooManyLeases(ItemError, code="MMC412"):
    """The connection holds as many leases as its control memory has words."""


class TooManyRequests(ItemError, code="MMC413"):
    """The connection has as many requests or questions open as it may; ask again when some are answered."""


class NotCached(ItemError, code="MMC414"):
    """Only its key was given, and no tier has its embedding."""


class SliceGone(ItemError, code="MMC415"):
    """A reference is over.

    All its consumers have come, it was cancelled or is older than lease_limit_s, its embedding went with its rank or by
    a reload, or the process that made it is gone.
    """


class StagingExhausted(ItemError, code="MMC416"):
    """No room in the staging region within the deadline, or pixels larger than it."""


class WrongEmbedding(ItemError, code="MMC417"):
    """An embedding that was given does not fit the model that is served: its shape, dtype, grid or fingerprint."""


class DeadlineExceeded(ItemError, code="MMC418"):
    """The request's deadline passed before this item was done."""


ITEM_ERRORS: dict[str, type[ItemError]] = {
    kind.__name__: kind
    for kind in (
        UnreadableItem,
        UnsupportedItem,
        UndecodableImage,
        UnsupportedMode,
        ImageTooLarge,
        ContentMismatch,
        NonFiniteEmbedding,
        EncodeFailed,
        NoRanks,
        Overloaded,
        PoolExhausted,
        TooManyLeases,
        TooManyRequests,
        NotCached,
        SliceGone,
        StagingExhausted,
        WrongEmbedding,
        DeadlineExceeded,
    )
}


class DeviceUnavailable(MMCacheError, code="MMC305"):
    """An embedding is in the memory of a CUDA device that this process cannot map, or that failed.

    `client.fetch` copies it. A lease that it keeps from ending goes on until the process ends.
    """


class CapturingError(MMCacheError, code="MMC306"):
    """A stream is being captured into a CUDA graph.

    No lease can end there: each replay would end it again. Nothing can be staged from there: staging waits for it.
    """


class EncodeError(MMCacheError, code="MMC307"):
    """Some items of a request failed after the rest was done.

    A context manager: leaving it, or dropping it, releases the leases in `results`.

    Attributes:
        results: a lease or an ItemError for each item, in the order of the items.
    """

    def __init__(self, results: Sequence[Lease | ItemError]) -> None:
        self.results: list[Lease | ItemError] = list(results)
        errors = [result for result in self.results if isinstance(result, ItemError)]
        shown = "; ".join(str(error) for error in errors[:3])
        more = f"; and {len(errors) - 3} more" if len(errors) > 3 else ""
        super().__init__(f"{len(errors)} of {len(self.results)} items failed: {shown}{more}")

    def release(self) -> None:
        """Release every lease in `results`. Doing so twice is harmless."""
        for result in self.results:
            if not isinstance(result, ItemError):
                result.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def __del__(self) -> None:
        for result in getattr(self, "results", ()):
            if not isinstance(result, ItemError):
                result.release()
