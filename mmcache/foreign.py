"""Embeddings that another encoder made: an engine's own, cached under a name of their own."""

from __future__ import annotations

from typing import NamedTuple, Self

from mmcache.keys import Fingerprint, foreign_key

VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a value of an embedding, by its dtype."""


class ForeignModel(NamedTuple):
    """The model of whoever connects with it, if that is not the sidecar's: `connect(foreign=...)`.

    Everything on such a connection is of this model: nothing of the sidecar's own, or of any other, is found, and what
    is not there is `NotCached` instead of encoded.

    Attributes:
        fingerprint: digest of all that decides an embedding besides the content; whoever makes them answers for it.
        dtype: of the embeddings: "float32", "bfloat16" or "float16". Each may have a width of its own.
    """

    fingerprint: Fingerprint
    dtype: str

    @classmethod
    def of(cls, fingerprint: bytes, dtype: str) -> Self:
        """Raises ValueError unless they are a fingerprint and a dtype that can be cached."""
        if dtype not in VALUE_BYTES:
            raise ValueError(f"a foreign model's dtype must be one of {', '.join(VALUE_BYTES)}, got {dtype!r}")
        return cls(Fingerprint(fingerprint), dtype)

    def key(self, key: bytes) -> bytes:
        """What a content key is called in the index, where the keys of all models are side by side."""
        return foreign_key(self.fingerprint, key)
