"""References: small plain data that names memory in the sidecar, to be sent to other processes instead of the bytes.

Each is a tuple of numbers and strings: it goes through JSON, msgpack, pickle or a queue, and `of` makes it again of
what arrives. A reference entitles whoever has it, within its namespace; its token is not to be guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any, NamedTuple, Self

from mmcache.array_checks import checked_grid
from mmcache.foreign import VALUE_BYTES
from mmcache.keys import ContentKey, Fingerprint


class SliceRef(NamedTuple):
    """Names an embedding with shares for others: `client.open(ref)` claims one.

    Attributes:
        token: names the offer.
        key: content key, hex.
        fingerprint: of the model that the embedding is of, hex.
        dtype: "float32" or "bfloat16"; of a foreign model also "float16".
        num_tokens, dim, nbytes: of the embedding.
        grid_thw: patches in time, height and width, before merging.
    """

    token: int
    key: str
    fingerprint: str
    dtype: str
    num_tokens: int
    dim: int
    nbytes: int
    grid_thw: tuple[int, int, int]

    @classmethod
    def of(cls, values: Sequence[Any]) -> Self:
        """Make a reference of what arrived from elsewhere. Raises ValueError if it is none."""
        try:
            token, key, fingerprint, dtype, *sizes, grid = values
            num_tokens, dim, nbytes = map(index, sizes)
            ref = cls(_token(token), key, fingerprint, dtype, num_tokens, dim, nbytes, checked_grid(grid))
            ContentKey.from_hex(ref.key)
            Fingerprint.from_hex(ref.fingerprint)
            if num_tokens <= 0 or dim <= 0 or nbytes != num_tokens * dim * VALUE_BYTES.get(dtype, 0):
                raise ValueError(f"no embedding [{num_tokens}, {dim}] of {dtype!r} has {nbytes} bytes")
        except (TypeError, ValueError) as error:
            raise ValueError(f"not a SliceRef: {error}") from None
        return ref

    def mismatch(self, num_tokens: int, nbytes: int, grid_thw: tuple[int, int, int]) -> str:
        """How what it names differs from what it says, in words; empty if it does not."""
        found = (num_tokens, nbytes, grid_thw)
        said = (self.num_tokens, self.nbytes, self.grid_thw)
        if found == said:
            return ""
        return f"the reference says tokens, bytes and grid {said}, what it names has {found}: it was edited"


class StagedRef(NamedTuple):
    """Names pixels that were staged: an item for `client.encode`, in any process of the namespace.

    Attributes:
        token: names the slice.
        key: content key, hex: a claim of who staged it, checked before anything of it is cached.
        shape: of the array.
        nbytes: of the pixels.
    """

    token: int
    key: str
    shape: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, values: Sequence[Any]) -> Self:
        """Make a reference of what arrived from elsewhere. Raises ValueError if it is none."""
        try:
            token, key, shape, nbytes = values
            ref = cls(_token(token), key, tuple(map(index, shape)), index(nbytes))
            ContentKey.from_hex(ref.key)
        except (TypeError, ValueError) as error:
            raise ValueError(f"not a StagedRef: {error}") from None
        return ref


def slice_refs(refs: SliceRef | Sequence[SliceRef]) -> list[SliceRef]:
    """What a user wants to open, as a list. Raises TypeError or ValueError unless they are references."""
    wanted = [refs] if isinstance(refs, SliceRef) else list(refs)
    if not all(isinstance(ref, SliceRef) for ref in wanted):
        raise TypeError("open takes SliceRefs; SliceRef.of(values) makes one of what arrived as a list")
    return [SliceRef.of(ref) for ref in wanted]


def _token(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < 1 << 64:
        raise ValueError(f"its token is not a number of 64 bits: {value!r}")
    return value
