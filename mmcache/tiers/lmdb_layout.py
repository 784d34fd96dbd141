"""How entries lie in an LMDB file (docs/stored-format.md): every operation on them within one transaction."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmcache.tiers.base import Entry, Selection
from mmcache.tiers.codec import DamagedEntryError, Header, pack_header, unpack_header
from mmcache.tiers.threads import Landing, Outcome, Step

NAMES = (b"headers", b"chunks", b"order")
MARK = (b"mmcache", b"1")
"""The record of the main database that says whose file this is, and its layout version."""
MAX_EVICTIONS_A_TRANSACTION = 64
MAX_LOOKED_AT_A_TRANSACTION = 4096

_INDEX = struct.Struct(">I")
_AGE = struct.Struct(">Q")
_PAGE_HEADER_BYTES = 16


def claim(txn: Any) -> bytes | None:
    """Mark an empty file as ours. Returns None if it is ours now, else what it holds in place of our mark."""
    name, version = MARK
    found: bytes | None = txn.get(name)
    if found is None and txn.stat()["entries"] == 0:
        txn.put(name, version)
        return None
    return None if found == version else found or b""


def lost_its_mark(txn: Any, held: bytes) -> bool:
    """Whether a file that `claim` found to hold `held` is damaged rather than another's: it has our databases."""
    return not held.isdigit() and sum(txn.get(name) is not None for name in NAMES) > 1


@dataclass(frozen=True, slots=True)
class Layout:
    """The three databases of a file, and its page size. `txn` is an open transaction, for writing where needed."""

    headers: Any
    chunks: Any
    order: Any
    page_bytes: int

    def records(self, txn: Any, keys: Sequence[bytes]) -> list[bytes | None]:
        """The stored header of each key, unchecked."""
        return [txn.get(key, db=self.headers) for key in keys]

    def header(self, txn: Any, key: bytes) -> Header | None:
        """The header of a key; None when it is absent or damaged."""
        record = txn.get(key, db=self.headers)
        try:
            return None if record is None else unpack_header(key, record)
        except DamagedEntryError:
            return None

    def copy(self, txn: Any, entry: Entry, landing: Landing) -> Outcome:
        """Copy a payload, its checksum still to be verified. `txn` yields buffers."""
        record = txn.get(entry.key, db=self.headers)
        if record is None:
            return Outcome.GONE
        try:
            header = unpack_header(entry.key, record)
        except DamagedEntryError:
            return Outcome.DAMAGED
        if header.entry != entry:
            return Outcome.GONE
        for index in range(header.num_chunks):
            start, stop = header.chunk(index)
            chunk = txn.get(entry.key + _INDEX.pack(index), db=self.chunks)  # touches the pages without the GIL
            if chunk is None or len(chunk) != stop - start:
                return Outcome.DAMAGED
            if not landing.write(start, chunk):
                return Outcome.ABANDONED
        return Outcome.READ

    def write(self, txn: Any, header: Header, payload: memoryview) -> None:
        """Store an entry in place of whatever its key has, unless that is the same embedding."""
        entry = header.entry
        old = self.header(txn, entry.key)
        if old is not None and (old.entry.shape, old.entry.checksum) == (entry.shape, entry.checksum):
            return
        self.delete(txn, entry.key)
        for index in range(header.num_chunks):
            start, stop = header.chunk(index)
            txn.put(entry.key + _INDEX.pack(index), payload[start:stop], db=self.chunks)
        txn.put(_place(entry), b"", db=self.order)
        txn.put(entry.key, pack_header(entry, header.chunk_bytes), db=self.headers)

    def delete(self, txn: Any, key: bytes) -> None:
        """Remove whatever there is of a key, whole or damaged."""
        if (header := self.header(txn, key)) is not None:
            txn.delete(_place(header.entry), db=self.order)
        txn.delete(key, db=self.headers)
        with txn.cursor(db=self.chunks) as cursor:
            found = cursor.set_range(key)
            while found and bytes(cursor.key()[: len(key)]) == key:
                cursor.delete()  # moves on to the next, or to an empty key behind the last

    def evict(self, txn: Any, excess_bytes: int) -> int:
        """Remove the oldest entries until `excess_bytes` are free, or enough for one transaction. Returns how many."""
        num_evicted = freed = 0
        with txn.cursor(db=self.order) as cursor:
            while freed < excess_bytes and num_evicted < MAX_EVICTIONS_A_TRANSACTION and cursor.first():
                place = cursor.key()
                cursor.delete()
                # A place that no header points back to is a leftover of a damaged one.
                if (header := self.header(txn, key := place[_AGE.size :])) and _place(header.entry) == place:
                    freed += self.cost_bytes(header)
                    self.delete(txn, key)
                num_evicted += 1
        return num_evicted

    def purge(self, txn: Any, selection: Selection, after: bytes, *, is_dry_run: bool) -> Step:
        """Remove entries that are meant, or count them, from the key `after` on: as many as one transaction may."""
        keys, after_that = self._keys(txn, selection, after)
        num_entries = nbytes = num_damaged = 0
        for key, record in zip(keys, self.records(txn, keys), strict=True):
            if num_entries + num_damaged == MAX_EVICTIONS_A_TRANSACTION and not is_dry_run:
                return Step(num_entries, nbytes, num_damaged, key)
            if record is None:
                continue
            try:
                entry = unpack_header(key, record).entry
            except DamagedEntryError:
                num_damaged += 1
            else:
                if not selection.has(entry):
                    continue
                num_entries += 1
                nbytes += entry.nbytes
            if not is_dry_run:
                self.delete(txn, key)
        return Step(num_entries, nbytes, num_damaged, after_that)

    def _keys(self, txn: Any, selection: Selection, after: bytes) -> tuple[list[bytes], bytes | None]:
        """Keys at or behind `after` that may be meant, and the first of those that are too many for now."""
        if selection.keys is not None:
            rest = sorted(key for key in selection.keys if key >= after)
            keys, more = rest[:MAX_LOOKED_AT_A_TRANSACTION], rest[MAX_LOOKED_AT_A_TRANSACTION:]
            return keys, more[0] if more else None
        prefix = selection.fingerprint or b""
        keys = []
        with txn.cursor(db=self.headers) as cursor:
            found = cursor.set_range(max(prefix, after)) if prefix or after else cursor.first()
            while found and (key := bytes(cursor.key())).startswith(prefix):
                if len(keys) == MAX_LOOKED_AT_A_TRANSACTION:
                    return keys, key
                keys.append(key)
                found = cursor.next()
        return keys, None

    def cost_bytes(self, header: Header) -> int:
        """The pages that an entry takes, and a little more."""
        sizes = (stop - start for start, stop in map(header.chunk, range(header.num_chunks)))
        return self.page_bytes * sum(2 + (size + _PAGE_HEADER_BYTES) // self.page_bytes for size in sizes)

    def usage(self, txn: Any) -> tuple[int, int]:
        """Entries, and bytes of the pages that they take."""
        stats = [txn.stat(database) for database in (self.headers, self.chunks, self.order)]
        pages = sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)
        return stats[0]["entries"], pages * self.page_bytes


def _place(entry: Entry) -> bytes:
    return _AGE.pack(int(entry.created_s * 1e6)) + entry.key
