"""Names of content: what an item is called, and what decides its embedding besides its content.

A content key is xxh3_128 under a secret seed. That hash is fast, not cryptographic: clients of one namespace must
trust each other not to construct collisions.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING, Self

import xxhash

if TYPE_CHECKING:
    from typing_extensions import Buffer

KEY_VERSION = 1
DIGEST_BYTES = 16
STORE_KEY_BYTES = 2 * DIGEST_BYTES
NAMESPACE_ID_BYTES = 8

_KEY_TAG = b"mmcache content key"
_FINGERPRINT_TAG = b"mmcache fingerprint"
_NAMESPACE_TAG = b"mmcache namespace"
_FOREIGN_TAG = b"mmcache foreign key"
_LENGTH = struct.Struct("<Q")


class _Digest(bytes):
    """Sixteen bytes that read as hex."""

    __slots__ = ()

    def __new__(cls, digest: Buffer) -> Self:
        self = super().__new__(cls, digest)
        if len(self) != DIGEST_BYTES:
            raise ValueError(f"a {cls.__name__} has {DIGEST_BYTES} bytes, got {len(self)}")
        return self

    @classmethod
    def from_hex(cls, text: str) -> Self:
        """Read what `str()` wrote. Raises ValueError unless `text` is exactly 32 hex digits."""
        if len(text) != 2 * DIGEST_BYTES:
            raise ValueError(f"a {cls.__name__} has {2 * DIGEST_BYTES} hex digits, got {text!r}")
        return cls(bytes.fromhex(text))

    def __str__(self) -> str:
        return self.hex()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.hex()})"


class ContentKey(_Digest):
    """Digest naming one item's bytes within a namespace. `str()` is 32 hex digits."""

    __slots__ = ()


class Fingerprint(_Digest):
    """Digest of all that decides an embedding besides the content. `str()` is 32 hex digits."""

    __slots__ = ()


class KeyHasher:
    """Makes the content keys of one namespace under one secret. Threads may share it.

    Args:
        seed: the secret, 0 to 2**64 - 1.
        namespace: the tenant; part of every key.
    """

    __slots__ = ("_prefix", "namespace")

    def __init__(self, seed: int, namespace: str = "") -> None:
        if not 0 <= seed < 1 << 64:
            raise ValueError("seed must be an integer of 64 bits, 0 to 2**64 - 1")
        self.namespace = namespace
        self._prefix = xxhash.xxh3_128(seed=seed)
        for part in (_KEY_TAG, _LENGTH.pack(KEY_VERSION), namespace.encode()):
            self._prefix.update(_LENGTH.pack(len(part)) + part)

    def key(self, kind: str, header: bytes, raw: Buffer) -> ContentKey:
        """The key of one item; reads `raw` once, without a copy and (when large) without the GIL.

        Args:
            kind: what `raw` is ("encoded", "image", "array", ...).
            header: canonical description of `raw` (shape, dtype, mode, ...); empty for encoded bytes.
            raw: the content, C-contiguous.

        Raises:
            ValueError: `raw` is not C-contiguous.
        """
        view = _contiguous(raw)
        state = self._begin(kind, header, view.nbytes)
        state.update(view)
        return ContentKey(state.digest())

    def begin(self, kind: str, header: bytes, nbytes: int) -> KeyState:
        """The key of one item whose `nbytes` bytes of raw content come piece by piece."""
        return KeyState(self._begin(kind, header, nbytes))

    def _begin(self, kind: str, header: bytes, nbytes: int) -> xxhash.xxh3_128:
        name = kind.encode()
        state = self._prefix.copy()
        state.update(b"".join((_LENGTH.pack(len(name)), name, _LENGTH.pack(len(header)), header, _LENGTH.pack(nbytes))))
        return state


class KeyState:
    """A key in the making."""

    __slots__ = ("_state",)

    def __init__(self, state: xxhash.xxh3_128) -> None:
        self._state = state

    def update(self, piece: Buffer) -> None:
        """The next piece of the raw content, C-contiguous."""
        self._state.update(_contiguous(piece))

    def key(self) -> ContentKey:
        """The key of what has come."""
        return ContentKey(self._state.digest())


def fingerprint(
    *,
    weights_digest: bytes,
    model_config: str,
    processor: str,
    decoding: str,
    dtype: str,
    is_deterministic: bool,
    numerics_version: int,
    adapter: str = "",
) -> Fingerprint:
    """Digest of everything that decides an embedding besides the content.

    Args:
        weights_digest: see `digest_parts`.
        model_config: canonical text of the model's shape.
        processor: canonical text of the preprocessing settings.
        decoding: canonical text of what decides the pixels of a file.
        dtype: of the output ("float32", "bfloat16").
        is_deterministic: whether the encoder was told to be bit-identical.
        numerics_version: raised by every change of code that changes an embedding's bytes.
        adapter: name and digest of an adapter, empty for none.
    """
    numerics = f"{numerics_version}{' deterministic' if is_deterministic else ''}"
    texts = (model_config, processor, decoding, dtype, numerics, adapter)
    return Fingerprint(digest_parts((_FINGERPRINT_TAG, weights_digest, *(text.encode() for text in texts))))


def digest_parts(parts: Iterable[Buffer]) -> bytes:
    """Digest of 16 bytes over a sequence of C-contiguous parts, each prefixed by its length."""
    state = xxhash.xxh3_128()
    for part in parts:
        view = _contiguous(part)
        state.update(_LENGTH.pack(view.nbytes))
        state.update(view)
    return state.digest()


def namespace_id(namespace: str) -> bytes:
    """What a namespace is called in a store: 8 bytes. It selects entries; what separates them is their key."""
    return xxhash.xxh3_64_digest(_NAMESPACE_TAG + namespace.encode())


def foreign_key(fingerprint: bytes, key: bytes) -> bytes:
    """What a content key of another model than the served one is called beside those of the served one: 16 bytes."""
    return xxhash.xxh3_128_digest(_FOREIGN_TAG + fingerprint + key)


def checksum(payload: Buffer) -> int:
    """Checksum of 64 bits over a C-contiguous payload, against accidents and not against attackers."""
    return xxhash.xxh3_64_intdigest(payload)


def store_key(fingerprint: Fingerprint, key: ContentKey) -> bytes:
    """What an embedding is called in a store: fingerprint, then content key; 32 bytes."""
    return bytes(fingerprint) + bytes(key)


def _contiguous(raw: Buffer) -> memoryview:
    view = memoryview(raw)
    if not view.c_contiguous:
        raise ValueError("only C-contiguous memory can be hashed")
    return view
