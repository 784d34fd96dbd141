"""Digests of weights that were loaded before, by the identity of their files, so that a restart need not make them."""

from __future__ import annotations

from pathlib import Path

from mmcache.server.state_cache import StateCache, is_hex_digest


class DigestCache(StateCache[str]):
    """Digest by identity of the files, both 32 hex digits."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "digests", _checked)


def _checked(value: object) -> str:
    if not isinstance(value, str) or not is_hex_digest(value):
        raise ValueError("it holds something else than digests")
    return value
