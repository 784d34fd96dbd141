"""The file store: one LMDB file, opened with care, its transactions guarded."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import lmdb

from mmcache.errors import ConfigError
from mmcache.keys import checksum
from mmcache.tiers.base import Entry, Selection, TierError
from mmcache.tiers.codec import DamagedEntryError, Header, unpack_header
from mmcache.tiers.lmdb_guard import DamagedFileError, ForeignFileError, Guard, preflight, read_meta, set_aside
from mmcache.tiers.lmdb_layout import MARK, NAMES, Layout, claim, lost_its_mark
from mmcache.tiers.lmdb_pages import verify
from mmcache.tiers.threaded import BlockingFile, ThreadedTier
from mmcache.tiers.threads import Gate, Landing, Outcome, Step, Threads

log = logging.getLogger(__name__)

BUDGET_SHARE = 0.7
"""Of the map, for entries; the rest lets a full store keep finding runs of free pages."""
CHUNK_BYTES = (512 << 10) - 16
EVICTION_ROOM_BYTES = 16 << 20
MAX_ATTEMPTS = 8

_DAMAGE = (
    lmdb.BadTxnError, lmdb.CorruptedError, lmdb.IncompatibleError, lmdb.InvalidError, lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
)  # fmt: skip


class _FullError(TierError):
    """No run of free pages is long enough."""


class LmdbFile(BlockingFile):
    """The file. A damaged one is set aside and an empty one started: when it is opened, and else at the next start.

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
        self._fault: str | None = None
        self.num_damaged = 0
        try:
            try:
                self._env, self._layout, self._guard = _open(path, map_bytes)
            except (DamagedFileError, *_DAMAGE) as error:
                self.num_damaged = 1
                log.error("store %s: damaged: %s; kept as %s, starting empty", path, error, set_aside(path))
                self._env, self._layout, self._guard = _open(path, map_bytes)
        except (lmdb.Error, OSError, DamagedFileError, ForeignFileError) as error:
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
            except _FullError:  # free pages too scattered, or still seen by a reader
                num_evicted += self._evict(need)
        raise TierError(f"no room for {entry.nbytes} bytes after {num_evicted} evictions")

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove what is there of these entries, whole or damaged."""
        with self._begin(write=True) as txn:
            for key in keys:
                self._layout.delete(txn, key)

    def purge(self, selection: Selection, after: bytes, is_dry_run: bool) -> Step:
        """One transaction of a purge, from the key `after` on."""
        with self._begin(write=not is_dry_run) as txn:
            return self._layout.purge(txn, selection, after, is_dry_run=is_dry_run)

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
            self._env.reader_check()
            return self._layout.evict(txn, excess)

    @contextmanager
    def _begin(self, *, write: bool = False, buffers: bool = False) -> Iterator[Any]:
        if self._fault is not None:
            raise TierError(f"the file store is out of use until the next start: {self._fault}")
        try:
            with self._resized(write, buffers) as txn:
                self._guard.check(self._last_page)  # again: it may have waited long
                if write:
                    self._guard.pad(self._last_page())
                yield txn
            if write:
                self._guard.check(self._last_page)  # how far the file reaches now
        except (DamagedFileError, FileNotFoundError, *_DAMAGE) as error:
            self._give_up(error)
            raise TierError(f"the file store is damaged: {error}") from error
        except lmdb.MapFullError as error:
            raise _FullError(f"the file store is full: {error}") from error
        except (lmdb.Error, OSError) as error:
            raise TierError(f"the file store failed: {error}") from error

    @contextmanager
    def _resized(self, write: bool, buffers: bool) -> Iterator[Any]:
        begin: Any = self._env.begin
        with self._gate.shared():
            self._guard.check(self._last_page)
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

    def _last_page(self) -> int:
        last_page: int = self._env.info()["last_pgno"]
        return last_page

    def _give_up(self, error: Exception) -> None:
        """Use the file no more; the next start finds it set aside, and begins with an empty one."""
        self._fault = str(error)
        self.num_damaged = 1
        log.error("store: the file is damaged and out of use until the next start: %s", error)
        with suppress(OSError):
            self._guard.set_aside()


class LmdbTier(ThreadedTier):
    """The file store; made by `open`. Several processes may open one file."""

    name = "lmdb"

    @classmethod
    async def open(
        cls, path: Path, map_bytes: int, *, chunk_bytes: int = CHUNK_BYTES, num_readers: int = 2
    ) -> LmdbTier:
        """Open or make the file, in a thread; arguments and errors as for `LmdbFile`.

        It takes as long as another process holds the file's writer lock, and as the pages of keys take to be read.
        Cancelling it leaves the thread behind, which then closes the file, and keeps nothing from ending.
        """
        with ExitStack() as unless_opened:
            writer = Threads(1, "mmcache-lmdb-write")
            unless_opened.callback(writer.end)
            file, usage = await writer.submit(_opened, path, map_bytes, chunk_bytes)
            unless_opened.pop_all()
        return cls(file, usage, writer, Threads(num_readers, "mmcache-lmdb-read"))


def _opened(path: Path, map_bytes: int, chunk_bytes: int) -> tuple[LmdbFile, tuple[int, int]]:
    file = LmdbFile(path, map_bytes, chunk_bytes)
    try:
        return file, file.usage()
    except TierError as error:
        raise ConfigError(f"store = {path}: must be readable: {error}") from error


def _open(path: Path, map_bytes: int) -> tuple[lmdb.Environment, Layout, Guard]:
    preflight(path)
    with ExitStack() as unless_opened:
        env = lmdb.Environment(
            str(path), map_size=_map_bytes(path, map_bytes), subdir=False, max_dbs=len(NAMES), mode=0o600,
            metasync=False, max_spare_txns=4,
        )  # fmt: skip
        unless_opened.callback(env.close)
        env.reader_check()
        guard = Guard(path, env.stat()["psize"])
        with env.begin(write=True) as txn:
            last_page = env.info()["last_pgno"]
            guard.check(lambda: last_page)
            _verify(path)
            guard.pad(last_page)
            if (held := claim(txn)) is not None:
                if lost_its_mark(txn, held):
                    raise DamagedFileError("its mark is gone")
                raise ConfigError(f"store = {path}: must be a store of this release, it holds {_named(held)}")
            headers, chunks, order = (env.open_db(name, txn=txn) for name in NAMES)
            layout = Layout(headers, chunks, order, env.stat()["psize"])
        unless_opened.pop_all()
    return env, layout, guard


def _verify(path: Path) -> None:
    with path.open("rb") as file:
        verify(file.fileno(), read_meta(file.fileno()), MARK[0])


def _map_bytes(path: Path, wanted: int) -> int:
    """A file that once was allowed more keeps its size, and needs room to evict down to the new budget."""
    size = path.stat().st_size if path.exists() else 0
    return wanted if size <= wanted else size + EVICTION_ROOM_BYTES


def _named(held: bytes) -> str:
    return f"layout version {held[:20]!r}" if held else "something else"
