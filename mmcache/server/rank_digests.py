"""What a rank remembers of the embeddings that it made, so that checking their bits needs no copy."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from encoder.digest import digests


class KeptDigests:
    """Digests by extent, of what was encoded there last; of what was copied there, none. For several threads."""

    def __init__(self, is_on: bool) -> None:
        """`is_on`: whether anything will ever be checked; else nothing is digested."""
        self._is_on = is_on
        self._kept: dict[int, int] = {}
        self._lock = threading.Lock()

    def encoded(self, extents: Sequence[int], embeddings: Sequence[torch.Tensor]) -> None:
        """Embeddings lie in extents from now on, complete."""
        if self._is_on and embeddings:
            found = digests(embeddings)
            with self._lock:
                self._kept.update(zip(extents, found, strict=True))

    def copied(self, extent: int) -> None:
        """Something else lies in an extent from now on."""
        with self._lock:
            self._kept.pop(extent, None)

    def is_intact(self, extent: int, embedding: torch.Tensor) -> bool:
        """Whether every bit is what was encoded there; True if that is not known."""
        with self._lock:
            kept = self._kept.get(extent)
        return kept is None or digests([embedding]) == [kept]
