"""The file store: one LMDB file, one writer thread, few reader threads; docs/stored-format.md describes the file."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import Enum, auto
from pathlib import Path
from typing import Any, TypeVar

import lmdb

from mmcache.errors import ConfigError
from mmcache.keys import checksum
from mmcache.tiers.base import Entry, Tier, TierError
from mmcache.tiers.codec import DamagedEntryError, Header, pack_header, unpack_header
from mmcache.tiers.threads import Gate, Landing, settled

T = TypeVar("T")

LAYOUT = (b"mmcache", b"1")
BUDGET_SHARE = 0.7
"""Of the map, for entries; the rest lets a full store keep finding runs of free pages."""
CHUNK_BYTES = (512 << 10) - 16
MAX_EVICTIONS_A_TRANSACTION = 64
MAX_ATTEMPTS = 8

_INDEX = struct.Struct(">I")
_AGE = struct.Struct(">Q")
_PAGE_HEADER_BYTES = 16


class Outcome(Enum):
    """How a read ended."""

    READ = auto()
    GONE = auto()
    DAMAGED = auto()
    ABANDONED = auto()


class LmdbFile:
    """The file, for threads: any may read, one at a time may write. Raises lmdb.Error and OSError as they come.

    Args:
        path: the file; made with mode 0600 if missing.
        map_bytes: its largest size; entries take up to 70 % of it.
        chunk_bytes: how payloads written from now on are cut.

    Raises:
        ConfigError: it cannot be opened, or holds something else.
    """

    def __init__(self, path: Path, map_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._budget_bytes = int(map_bytes * BUDGET_SHARE)
        self._gate = Gate()
        try:
            self._env = lmdb.Environment(
                str(path), map_size=map_bytes, subdir=False, max_dbs=3, mode=0o600, metasync=False, max_spare_txns=4
            )
            self._env.reader_check()
            with self._env.begin(write=True) as txn:
                _claim_layout(txn, path)
                self._headers, self._chunks, self._order = (
                    self._env.open_db(name, txn=txn) for name in (b"headers", b"chunks", b"order")
                )
        except (lmdb.Error, OSError) as error:
            raise ConfigError(f"store = {path}: must be a file that LMDB can open and write: {error}") from error

    def find(self, keys: Sequence[bytes]) -> tuple[list[Entry | None], list[bytes]]:
        """Entries in the order of the keys, and the keys whose records are damaged (None among the entries)."""
        with self._begin() as txn:
            records = [txn.get(key, db=self._headers) for key in keys]
        found: list[Entry | None] = []
        damaged = []
        for key, record in zip(keys, records, strict=True):
            try:
                found.append(None if record is None else unpack_header(key, record).entry)
            except DamagedEntryError:
                found.append(None)
                damaged.append(key)
        return found, damaged

    def read(self, entry: Entry, landing: Landing) -> Outcome:
        """Copy and verify a payload. The transaction ends with the copy; the checksum is taken where it landed."""
        with self._begin(buffers=True) as txn:
            outcome = self._copy(txn, entry, landing)
        if outcome is Outcome.READ and checksum(landing.into[: entry.nbytes]) != entry.checksum:
            outcome = Outcome.DAMAGED
        # Asked last: memory that its owner took back meanwhile proves nothing about the entry.
        return Outcome.ABANDONED if landing.is_closed else outcome

    def _copy(self, txn: Any, entry: Entry, landing: Landing) -> Outcome:
        record = txn.get(entry.key, db=self._headers)
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
            chunk = txn.get(entry.key + _INDEX.pack(index), db=self._chunks)  # touches the pages without the GIL
            if chunk is None or len(chunk) != stop - start:
                return Outcome.DAMAGED
            if not landing.write(start, chunk):
                return Outcome.ABANDONED
        return Outcome.READ

    def put(self, entry: Entry, payload: memoryview) -> int:
        """Write an entry in one transaction, unless it is there. Returns how many were evicted for it.

        Raises:
            TierError: it can never fit, or no room could be made.
        """
        header = Header(entry, self._chunk_bytes)
        if (need := self._cost_bytes(header)) > self._budget_bytes:
            raise TierError(f"an entry of {entry.nbytes} bytes is beyond the store's budget of {self._budget_bytes}")
        num_evicted = self._make_room(need)
        for _ in range(MAX_ATTEMPTS):
            try:
                with self._begin(write=True) as txn:
                    if not self._holds(txn, entry):
                        self._write(txn, header, payload)
                return num_evicted
            except lmdb.MapFullError:  # free pages too scattered, or still seen by a reader
                self._env.reader_check()
                num_evicted += self._evict(need)
        raise TierError(f"no room for {entry.nbytes} bytes after {num_evicted} evictions")

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove what is there of these entries, whole or damaged."""
        with self._begin(write=True) as txn:
            for key in keys:
                self._delete(txn, key)

    def usage(self) -> tuple[int, int]:
        """Entries, and bytes of the pages that they take."""
        with self._begin() as txn:
            stats = [txn.stat(database) for database in (self._headers, self._chunks, self._order)]
        pages = sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)
        return stats[0]["entries"], pages * stats[0]["psize"]

    def close(self) -> None:
        """Close the file. No other call may be running, or come later."""
        self._env.close()

    def _cost_bytes(self, header: Header) -> int:
        page = self._env.stat()["psize"]
        sizes = (stop - start for start, stop in map(header.chunk, range(header.num_chunks)))
        return page * sum(2 + (size + _PAGE_HEADER_BYTES) // page for size in sizes)

    def _make_room(self, need: int) -> int:
        num_evicted = 0
        while (excess := self.usage()[1] + need - self._budget_bytes) > 0:
            if not (evicted := self._evict(excess)):
                break
            num_evicted += evicted
        return num_evicted

    def _evict(self, excess: int) -> int:
        """Remove the oldest entries, in a transaction of their own, until `excess` bytes are free. Returns how many."""
        num_evicted = freed = 0
        with self._begin(write=True) as txn, txn.cursor(db=self._order) as cursor:
            while freed < excess and num_evicted < MAX_EVICTIONS_A_TRANSACTION and cursor.first():
                place = cursor.key()
                cursor.delete()
                # A place that no header points back to is a leftover of a damaged one.
                if (header := self._header(txn, key := place[_AGE.size :])) and _place(header.entry) == place:
                    freed += self._cost_bytes(header)
                    self._delete(txn, key)
                num_evicted += 1
        return num_evicted

    def _header(self, txn: lmdb.Transaction, key: bytes) -> Header | None:
        record = txn.get(key, db=self._headers)
        try:
            return None if record is None else unpack_header(key, record)
        except DamagedEntryError:
            return None

    def _holds(self, txn: lmdb.Transaction, entry: Entry) -> bool:
        header = self._header(txn, entry.key)
        return header is not None and (header.entry.shape, header.entry.checksum) == (entry.shape, entry.checksum)

    def _write(self, txn: lmdb.Transaction, header: Header, payload: memoryview) -> None:
        entry = header.entry
        self._delete(txn, entry.key)
        for index in range(header.num_chunks):
            start, stop = header.chunk(index)
            txn.put(entry.key + _INDEX.pack(index), payload[start:stop], db=self._chunks)
        txn.put(_place(entry), b"", db=self._order)
        txn.put(entry.key, pack_header(entry, header.chunk_bytes), db=self._headers)

    def _delete(self, txn: lmdb.Transaction, key: bytes) -> None:
        if (header := self._header(txn, key)) is not None:
            txn.delete(_place(header.entry), db=self._order)
        txn.delete(key, db=self._headers)
        with txn.cursor(db=self._chunks) as cursor:
            found = cursor.set_range(key)
            while found and bytes(cursor.key()[: len(key)]) == key:
                cursor.delete()  # moves on to the next, or to an empty key behind the last

    @contextmanager
    def _begin(self, *, write: bool = False, buffers: bool = False) -> Iterator[Any]:
        begin: Any = self._env.begin
        with self._gate.shared():
            try:
                txn = begin(write=write, buffers=buffers)
            except lmdb.MapResizedError:
                txn = None
            if txn is not None:
                with txn:
                    yield txn
                return
        with self._gate.exclusive():  # another process made the file's map larger
            self._env.set_mapsize(0)
        with self._gate.shared(), begin(write=write, buffers=buffers) as txn:
            yield txn


class LmdbTier(Tier):
    """The file store. Several processes may open one file. Arguments and errors as for `LmdbFile`."""

    name = "lmdb"

    def __init__(self, path: Path, map_bytes: int, *, chunk_bytes: int = CHUNK_BYTES, num_readers: int = 2) -> None:
        super().__init__()
        self._file = LmdbFile(path, map_bytes, chunk_bytes)
        self._writer = ThreadPoolExecutor(1, "mmcache-lmdb-write")
        self._readers = ThreadPoolExecutor(num_readers, "mmcache-lmdb-read")
        self._removals: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._gauge(self._file.usage())

    async def find(self, keys: Sequence[bytes]) -> list[Entry | None]:
        found, damaged = await self._in(self._readers, self._file.find, keys)
        if damaged:
            self._discard(damaged)
        return found

    async def read(self, entry: Entry, into: memoryview) -> bool:
        landing = Landing(into.cast("B"))
        try:
            outcome = await self._in(self._readers, self._file.read, entry, landing)
        finally:
            landing.close()
        if outcome is Outcome.DAMAGED:
            self._discard([entry.key])
        return outcome is Outcome.READ

    async def put(self, entry: Entry, payload: memoryview) -> None:
        self.counters["evicted"] += await self._write(self._file.put, entry, payload.cast("B"))

    async def remove(self, keys: Sequence[bytes]) -> None:
        await self._write(self._file.remove, keys)

    async def close(self) -> None:
        if self._is_closed:
            return
        while self._removals:
            await asyncio.wait(self._removals)
        self._is_closed = True
        for executor in (self._readers, self._writer):
            await settled(asyncio.ensure_future(asyncio.to_thread(executor.shutdown)))
        self._file.close()

    def _discard(self, keys: Sequence[bytes]) -> None:
        """Count damaged entries and remove them behind the caller's back."""
        self.counters["damaged"] += len(keys)
        task = asyncio.ensure_future(self._remove_damaged(keys))
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)

    async def _remove_damaged(self, keys: Sequence[bytes]) -> None:
        try:
            await self.remove(keys)
        except TierError:
            self.counters["remove_failed"] += 1

    async def _write(self, work: Callable[..., T], *arguments: object) -> T:
        def measured() -> tuple[T, tuple[int, int]]:
            return work(*arguments), self._file.usage()

        result, usage = await self._in(self._writer, measured, whole=True)
        self._gauge(usage)
        return result

    def _gauge(self, usage: tuple[int, int]) -> None:
        self.counters["entries"], self.counters["bytes_used"] = usage

    async def _in(
        self, executor: ThreadPoolExecutor, work: Callable[..., T], *arguments: object, whole: bool = False
    ) -> T:
        if self._is_closed:
            raise TierError("the file store is closed")
        future = asyncio.get_running_loop().run_in_executor(executor, work, *arguments)
        try:
            return await (settled(future) if whole else future)
        except (lmdb.Error, OSError) as error:
            raise TierError(f"the file store failed: {error}") from error


def _place(entry: Entry) -> bytes:
    return _AGE.pack(int(entry.created_s * 1e6)) + entry.key


def _claim_layout(txn: lmdb.Transaction, path: Path) -> None:
    name, version = LAYOUT
    found = txn.get(name)
    if found is None and txn.stat()["entries"] == 0:
        txn.put(name, version)
    elif found != version:
        layout = "something else" if found is None else f"layout version {found[:20]!r}"
        raise ConfigError(f"store = {path}: must be a store of this release's layout, it holds {layout}")
