"""The stored format: one header a payload, little-endian, versioned; docs/stored-format.md describes it."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from mmcache.keys import NAMESPACE_ID_BYTES, STORE_KEY_BYTES, checksum
from mmcache.tiers.base import ITEM_BYTES, Entry

MAGIC = b"mmcache\0"
FORMAT_VERSION = 2
READ_VERSIONS = (2,)
MAX_PAYLOAD_BYTES = 1 << 36
MAX_CHUNK_BYTES = 4 << 20
MAX_GRID = 1 << 20

_LEAD = struct.Struct("<8sHH")  # magic, version, length of the whole header
_BODY = struct.Struct("<32s8sI IIIII QIQ dd")  # see docs/stored-format.md
_SEAL = struct.Struct("<Q")  # checksum of all before it
HEADER_BYTES = _LEAD.size + _BODY.size + _SEAL.size

_DTYPE_CODES = {"float32": 1, "bfloat16": 2, "float16": 3}
_DTYPES = {code: name for name, code in _DTYPE_CODES.items()}


class DamagedEntryError(Exception):
    """A stored record is not a whole header of this format version for this key."""


@dataclass(frozen=True, slots=True)
class Header:
    """An entry, and how its payload is cut: every chunk but the last has `chunk_bytes`."""

    entry: Entry
    chunk_bytes: int

    @property
    def num_chunks(self) -> int:
        """How many chunks hold the payload."""
        return -(-self.entry.nbytes // self.chunk_bytes)

    def chunk(self, index: int) -> tuple[int, int]:
        """Where chunk `index` begins and ends in the payload."""
        start = index * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.entry.nbytes)


def pack_header(entry: Entry, chunk_bytes: int) -> bytes:
    """The record that `unpack_header` reads back. Raises ValueError for an entry that the format cannot hold."""
    if (fault := _fault(entry, chunk_bytes)) is not None:
        raise ValueError(f"an entry cannot be stored: {fault}")
    lead = _LEAD.pack(MAGIC, FORMAT_VERSION, HEADER_BYTES)
    body = _BODY.pack(
        entry.key, entry.namespace, _DTYPE_CODES[entry.dtype], *entry.shape, *entry.grid_thw,
        entry.nbytes, chunk_bytes, entry.checksum, entry.created_s, entry.encode_seconds,
    )  # fmt: skip
    return lead + body + _SEAL.pack(checksum(lead + body))


def unpack_header(key: bytes, data: bytes | memoryview) -> Header:
    """Read a record that was stored under `key`; nothing in it is trusted before it is checked.

    Raises:
        DamagedEntryError: truncated, altered, of another version, or of another key.
    """
    record = bytes(data[: HEADER_BYTES + 1])
    if len(record) < _LEAD.size or record[: len(MAGIC)] != MAGIC:
        raise DamagedEntryError("not a header")
    _, version, length = _LEAD.unpack_from(record)
    if version != FORMAT_VERSION:
        raise DamagedEntryError(f"format version {version}, this release reads {FORMAT_VERSION}")
    if length != HEADER_BYTES or len(record) != HEADER_BYTES:
        raise DamagedEntryError("wrong length")
    sealed = HEADER_BYTES - _SEAL.size
    if checksum(record[:sealed]) != _SEAL.unpack_from(record, sealed)[0]:
        raise DamagedEntryError("header checksum does not match")
    return _read_body(key, record)


def _read_body(key: bytes, record: bytes) -> Header:
    (
        stored_key, namespace, dtype, tokens, dim, t, h, w, nbytes, chunk_bytes, digest, created_s, seconds,
    ) = _BODY.unpack_from(record, _LEAD.size)  # fmt: skip
    if stored_key != key:
        raise DamagedEntryError("belongs to another key")
    if dtype not in _DTYPES:
        raise DamagedEntryError(f"unknown dtype {dtype}")
    entry = Entry(stored_key, namespace, (tokens, dim), _DTYPES[dtype], (t, h, w), nbytes, digest, created_s, seconds)
    if (fault := _fault(entry, chunk_bytes)) is not None:
        raise DamagedEntryError(fault)
    return Header(entry, chunk_bytes)


def _fault(entry: Entry, chunk_bytes: int) -> str | None:
    """The first rule of the format that these values break."""
    tokens, dim = entry.shape
    rules = {
        f"a key has {STORE_KEY_BYTES} bytes": len(entry.key) == STORE_KEY_BYTES,
        f"a namespace has {NAMESPACE_ID_BYTES} bytes": len(entry.namespace) == NAMESPACE_ID_BYTES,
        "unknown dtype": entry.dtype in ITEM_BYTES,
        "empty or negative shape": min(tokens, dim) > 0,
        "size and shape disagree": entry.nbytes == tokens * dim * ITEM_BYTES.get(entry.dtype, 0),
        "payload too large": entry.nbytes <= MAX_PAYLOAD_BYTES,
        "grid out of range": all(0 < side <= MAX_GRID for side in entry.grid_thw),
        "chunk size out of range": 0 < chunk_bytes <= MAX_CHUNK_BYTES,
        "checksum has 64 bits": 0 <= entry.checksum < 1 << 64,
        "time out of range": 0 <= entry.created_s < 1 << 40 and 0 <= entry.encode_seconds < math.inf,
    }
    return next((fault for fault, holds in rules.items() if not holds), None)
