"""The file store: one LMDB file, one writer thread, few reader threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import lmdb

from mmcache.errors import ConfigError
from mmcache.keys import checksum
from mmcache.tiers.base import Entry, Tier, TierError
from mmcache.tiers.codec import DamagedEntryError, Header, unpack_header
from mmcache.tiers.lmdb_layout import NAMES, Layout, Outcome, claim
from mmcache.tiers.threads import Gate, Landing, settled

T = TypeVar("T")

BUDGET_SHARE = 0.7
"""Of the map, for entries; the rest lets a full store keep finding runs of free pages."""
CHUNK_BYTES = (512 << 10) - 16
EVICTION_ROOM_BYTES = 16 << 20
MAX_ATTEMPTS = 8


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
                str(path), map_size=_map_bytes(path, map_bytes), subdir=False, max_dbs=len(NAMES), mode=0o600,
                metasync=False, max_spare_txns=4,
            )  # fmt: skip
            self._env.reader_check()
            with self._env.begin(write=True) as txn:
                if (held := claim(txn)) is not None:
                    raise ConfigError(f"store = {path}: must be a store of this release, it holds {_named(held)}")
                headers, chunks, order = (self._env.open_db(name, txn=txn) for name in NAMES)
            self._layout = Layout(headers, chunks, order, self._env.stat()["psize"])
        except (lmdb.Error, OSError) as error:
            raise ConfigError(f"store = {path}: must be a file that LMDB can open and write: {error}") from error

    def find(self, keys: Sequence[bytes]) -> tuple[list[Entry | None], list[bytes]]:
        """Entries in the order of the keys, and the keys whose records are damaged (None among the entries)."""
        with self._begin() as txn:
            records = self._layout.records(txn, keys)
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
            outcome = self._layout.copy(txn, entry, landing)
        if outcome is Outcome.READ and checksum(landing.into[: entry.nbytes]) != entry.checksum:
            return Outcome.DAMAGED
        return outcome

    def put(self, entry: Entry, payload: memoryview) -> int:
        """Write an entry in one transaction, unless it is there. Returns how many were evicted for it.

        Raises:
            TierError: it can never fit, or no room could be made.
        """
        header = Header(entry, self._chunk_bytes)
        if (need := self._layout.cost_bytes(header)) > self._budget_bytes:
            raise TierError(f"an entry of {entry.nbytes} bytes is beyond the store's budget of {self._budget_bytes}")
        num_evicted = self._make_room(need)
        for _ in range(MAX_ATTEMPTS):
            try:
                with self._begin(write=True) as txn:
                    self._layout.write(txn, header, payload)
                return num_evicted
            except lmdb.MapFullError:  # free pages too scattered, or still seen by a reader
                self._env.reader_check()
                num_evicted += self._evict(need)
        raise TierError(f"no room for {entry.nbytes} bytes after {num_evicted} evictions")

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove what is there of these entries, whole or damaged."""
        with self._begin(write=True) as txn:
            for key in keys:
                self._layout.delete(txn, key)

    def usage(self) -> tuple[int, int]:
        """Entries, and bytes of the pages that they take."""
        with self._begin() as txn:
            return self._layout.usage(txn)

    def close(self) -> None:
        """Close the file. No other call may be running, or come later."""
        self._env.close()

    def _make_room(self, need: int) -> int:
        num_evicted = 0
        while (excess := self.usage()[1] + need - self._budget_bytes) > 0 and (evicted := self._evict(excess)):
            num_evicted += evicted
        return num_evicted

    def _evict(self, excess: int) -> int:
        with self._begin(write=True) as txn:
            return self._layout.evict(txn, excess)

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
        self._removals: set[asyncio.Future[tuple[None, tuple[int, int]]]] = set()
        self._is_closed = False
        self._gauge(self._file.usage())

    async def find(self, keys: Sequence[bytes]) -> list[Entry | None]:
        found, damaged = await self._read(self._file.find, keys)
        if damaged:
            self._discard(damaged)
        return found

    async def read(self, entry: Entry, into: memoryview) -> bool:
        landing = Landing(into.cast("B"))
        try:
            outcome = await self._read(self._file.read, entry, landing)
        finally:
            landing.close()  # a cancelled thread may still be at it, and nobody hears what it finds
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
        """Count damaged entries and have them removed, before anything that is put from now on."""
        self.counters["damaged"] += len(keys)
        removal = self._submit(self._writer, self._measured, self._file.remove, keys)
        self._removals.add(removal)
        removal.add_done_callback(self._discarded)

    def _discarded(self, removal: asyncio.Future[tuple[None, tuple[int, int]]]) -> None:
        self._removals.discard(removal)
        try:
            self._gauge(removal.result()[1])
        except (lmdb.Error, OSError):
            self.counters["remove_failed"] += 1

    async def _write(self, work: Callable[..., T], *arguments: object) -> T:
        done: asyncio.Future[tuple[T, tuple[int, int]]]
        done = self._submit(self._writer, self._measured, work, *arguments)
        with _failures():
            result, usage = await settled(done)
        self._gauge(usage)
        return result

    async def _read(self, work: Callable[..., T], *arguments: object) -> T:
        with _failures():
            return await self._submit(self._readers, work, *arguments)

    def _submit(self, executor: ThreadPoolExecutor, work: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        if self._is_closed:
            raise TierError("the file store is closed")
        return asyncio.get_running_loop().run_in_executor(executor, work, *arguments)

    def _measured(self, work: Callable[..., T], *arguments: object) -> tuple[T, tuple[int, int]]:
        return work(*arguments), self._file.usage()

    def _gauge(self, usage: tuple[int, int]) -> None:
        self.counters["entries"], self.counters["bytes_used"] = usage


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except (lmdb.Error, OSError) as error:
        raise TierError(f"the file store failed: {error}") from error


def _map_bytes(path: Path, wanted: int) -> int:
    """A file that once was allowed more keeps its size, and needs room to evict down to the new budget."""
    size = path.stat().st_size if path.exists() else 0
    return wanted if size <= wanted else size + EVICTION_ROOM_BYTES


def _named(held: bytes) -> str:
    return f"layout version {held[:20]!r}" if held else "something else"
