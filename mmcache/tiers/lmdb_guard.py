"""Whether an LMDB file is whole, seen from outside: LMDB would map what is missing, and the process would die."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SLACK_BYTES = 1 << 20
"""LMDB need not write the last pages, if one transaction took them and gave them back: they are missing, but unused."""

_MAGIC = 0xBEEFC0DE
_MAGIC_END = 20
# Page header; magic, version; page bytes and root of the free list; root of the main database; last page, transaction.
_META = struct.Struct("<16x II 16x I 36x Q 40x Q QQ")
_PAGE_BYTES = {1 << exponent for exponent in range(9, 17)}


class DamagedFileError(Exception):
    """The file lacks a part, or is not the one that was opened."""


class ForeignFileError(Exception):
    """The file was never an LMDB file, as far as one can tell."""


@dataclass(frozen=True, slots=True)
class Meta:
    """What a meta page says: the state that one transaction left."""

    page_bytes: int
    free_root: int
    main_root: int
    last_page: int
    transaction: int

    @property
    def used_bytes(self) -> int:
        """From the file's begin to the end of its last page."""
        return (self.last_page + 1) * self.page_bytes


class Guard:
    """Remembers a file, and tells when it was shortened or replaced. Used by threads at once.

    Args:
        path: the file, open in LMDB.
        page_bytes: of its pages.
    """

    def __init__(self, path: Path, page_bytes: int) -> None:
        status = path.stat()
        self._path = path
        self._page_bytes = page_bytes
        self._identity = (status.st_dev, status.st_ino)
        self._size = status.st_size

    def check(self, last_page: Callable[[], int]) -> None:
        """Compare with what was seen and with LMDB's last page, which is asked for only if its own pages are there.

        Raises:
            DamagedFileError, OSError: it is not what it was.
        """
        known = self._size  # before the look, as another thread may see the file grow meanwhile
        status = self._path.stat()
        if (status.st_dev, status.st_ino) != self._identity:
            raise DamagedFileError("another file is in its place")
        if status.st_size < known:  # LMDB never shortens one
            raise DamagedFileError(f"it was shortened from {known} to {status.st_size} bytes")
        self._size = status.st_size
        used_bytes = (last_page() + 1) * self._page_bytes
        if status.st_size < used_bytes:
            _compare(self._path.stat().st_size, used_bytes)  # looked at after LMDB's pages, it may have grown

    def pad(self, last_page: int) -> None:
        """Let the file reach to its last page. Only within a transaction for writing: no other may make it longer."""
        used_bytes = (last_page + 1) * self._page_bytes
        if self._path.stat().st_size < used_bytes:
            os.truncate(self._path, used_bytes)

    def set_aside(self) -> None:
        """Rename the file, unless another one has taken its place."""
        status = self._path.stat()
        if (status.st_dev, status.st_ino) == self._identity:
            set_aside(self._path)


def preflight(path: Path) -> None:
    """Look at a file before LMDB does, which trusts some of its numbers. A missing or empty one is whole.

    Raises:
        DamagedFileError: it cannot be opened safely.
        ForeignFileError: it does not begin as an LMDB file, and has no lock file beside it.
        OSError: it cannot be read.
    """
    with suppress(FileNotFoundError), path.open("rb") as file:
        begins_well = os.pread(file.fileno(), _MAGIC_END, 0).endswith(_MAGIC.to_bytes(4, "little"))
        if os.fstat(file.fileno()).st_size and not begins_well and not _lock_file(path).exists():
            raise ForeignFileError("it is not one")
        if os.fstat(file.fileno()).st_size:
            meta = read_meta(file.fileno())
            _compare(os.fstat(file.fileno()).st_size, meta.used_bytes)


def read_meta(descriptor: int) -> Meta:
    """The newer of a file's two meta pages. Raises DamagedFileError if they are none."""
    first = _meta(os.pread(descriptor, _META.size, 0))
    second = _meta(os.pread(descriptor, _META.size, first.page_bytes))
    if first.page_bytes != second.page_bytes:
        raise DamagedFileError("its first pages disagree")
    return max(first, second, key=lambda meta: meta.transaction)


def set_aside(path: Path) -> Path:
    """Rename a file to `.damaged`, and its lock file with it: a process that has both open keeps them for itself."""
    aside = path.with_name(path.name + ".damaged")
    path.replace(aside)
    with suppress(FileNotFoundError):
        _lock_file(path).replace(_lock_file(aside))
    return aside


def _lock_file(path: Path) -> Path:
    return path.with_name(path.name + "-lock")


def _meta(record: bytes) -> Meta:
    if len(record) < _META.size:
        raise DamagedFileError("its first pages are missing")
    magic, _, page_bytes, *rest = _META.unpack(record)
    if magic != _MAGIC or page_bytes not in _PAGE_BYTES:
        raise DamagedFileError("its first pages are not those of an LMDB file")
    return Meta(page_bytes, *rest)


def _compare(size: int, used_bytes: int) -> None:
    if size + SLACK_BYTES < used_bytes:
        raise DamagedFileError(f"it has {size} of the {used_bytes} bytes that are in use")
