"""Data memory on the CPU: memfds that one process writes and others map read only.

There are no names in a shared folder, so nothing is left behind by a killed process, and a process that was not handed
the descriptor cannot map the memory. A mapping is never pulled from under an array: every array keeps it alive.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import numpy as np

from ipc.errors import MemorySealError, MemoryUnavailable, OutOfBounds

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

    Bytes = NDArray[np.uint8]

SEAL_SEAL = fcntl.F_SEAL_SEAL
SEAL_SHRINK = fcntl.F_SEAL_SHRINK
SEAL_GROW = fcntl.F_SEAL_GROW
SEAL_WRITE = fcntl.F_SEAL_WRITE
SEAL_FUTURE_WRITE = 0x0010  # linux/fcntl.h; Python's fcntl names it from 3.13 on
SEALS_RESIZE = SEAL_SEAL | SEAL_SHRINK | SEAL_GROW
SEALS_READERS = SEALS_RESIZE | SEAL_FUTURE_WRITE
SEALS_FROZEN = SEALS_RESIZE | SEAL_WRITE

PART_ALIGNMENT = 64
_SEAL_NAMES = {
    SEAL_SEAL: "SEAL",
    SEAL_SHRINK: "SHRINK",
    SEAL_GROW: "GROW",
    SEAL_WRITE: "WRITE",
    SEAL_FUTURE_WRITE: "FUTURE_WRITE",
}


class SharedRegion:
    """A memfd mapped for reading and writing. The region owns a descriptor of its own; `close()` returns it.

    Attributes:
        fd: the region's descriptor, to be passed on to readers; valid until `close()`.
        nbytes: size in bytes, a multiple of the page.
    """

    def __init__(self, fd: int, mapping: mmap.mmap) -> None:
        """Use `create` or `attach`. Takes ownership of `fd`."""
        self.fd = fd
        self.nbytes = len(mapping)
        self._bytes: Bytes | None = np.frombuffer(mapping, np.uint8)
        self._close_fd = weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, name: str, nbytes: int) -> Self:
        """Make a memfd of at least `nbytes` bytes (rounded up to the page), allocate every page of it and map it.

        `name` is shown in /proc/PID/maps and need not be unique. Raises `MemoryUnavailable` if the system lacks the
        memory; nothing of it is kept then.
        """
        fd, size = allocated_memfd(name, nbytes)
        try:
            return cls(fd, mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
        except OSError as error:
            os.close(fd)
            raise _unavailable(name, size, error) from error

    @classmethod
    def attach(cls, fd: int, nbytes: int | None = None) -> Self:
        """Map a received memfd for reading and writing. `fd` stays the caller's.

        With `nbytes` the memory has to be at least that large. The memfd must be sealed against shrinking
        (`MemorySealError`), since a shortened file would kill its users, and not against writing.
        """
        size = check_sealed(fd, SEAL_SHRINK)
        if nbytes is not None and size < nbytes:
            raise OutOfBounds(f"a memory of at least {nbytes} bytes was expected, the descriptor has {size}")
        own = os.dup(fd)
        try:
            return cls(own, mmap.mmap(own, size, flags=mmap.MAP_SHARED))
        except PermissionError as error:
            os.close(own)
            raise MemorySealError("the memory is sealed against writing; map it with ReadOnlyRegion") from error
        except OSError as error:
            os.close(own)
            raise _unavailable("attached", size, error) from error

    def seal_resize(self) -> None:
        """Fix the size for good. Both ends may go on writing. Doing so twice is harmless."""
        add_seals(self.fd, SEALS_RESIZE)

    def seal_for_readers(self) -> None:
        """Fix the size and make mappings that exist now the only ones that can ever write. Twice is harmless.

        Whoever receives the descriptor afterwards can map it for reading only, whatever it tries: writing mappings,
        `write`, `mprotect`, reopening through /proc and punching holes are refused by the kernel.
        """
        add_seals(self.fd, SEALS_READERS)

    def array(self, offset: int, nbytes: int) -> Bytes:
        """A writable uint8 view of `nbytes` bytes at `offset`, without a copy. It keeps the mapping alive."""
        if self._bytes is None:
            raise OutOfBounds("the region is closed")
        _check_range(offset, nbytes, self.nbytes)
        return self._bytes[offset : offset + nbytes]

    def close(self) -> None:
        """Close the descriptor. Arrays stay valid; the last of them unmaps the memory. Twice is harmless."""
        self._bytes = None
        self._close_fd()


class ReadOnlyRegion:
    """A memfd mapped for reading. It is unmapped when the region and the last view of it are gone.

    Attributes:
        nbytes: size in bytes.
    """

    __slots__ = ("__weakref__", "_address", "_bytes", "nbytes")

    def __init__(self, mapping: mmap.mmap) -> None:
        """Use `attach`."""
        self.nbytes = len(mapping)
        self._bytes: Bytes = np.frombuffer(mapping, np.uint8)
        self._address: int = self._bytes.__array_interface__["data"][0]

    @classmethod
    def attach(cls, fd: int, seals: int = SEAL_SHRINK) -> Self:
        """Map a received memfd for reading. `fd` stays the caller's.

        Raises `MemorySealError` unless `fd` is a memfd that has all of `seals`, of which SHRINK is always one: a file
        that its sender shortens would kill the reader.
        """
        size = check_sealed(fd, seals | SEAL_SHRINK)
        frozen = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEAL_WRITE
        # Before Linux 6.7 a frozen memfd cannot be mapped shared, not even for reading; its bytes cannot change, so a
        # private mapping shows the same pages.
        flags = mmap.MAP_PRIVATE if frozen else mmap.MAP_SHARED
        try:
            return cls(mmap.mmap(fd, size, flags=flags, prot=mmap.PROT_READ))
        except OSError as error:
            raise _unavailable("read only", size, error) from error

    def view(self, offset: int, nbytes: int, owner: object | None = None, *, writable_flag: bool = False) -> Bytes:
        """A uint8 array over `nbytes` bytes at `offset`, without a copy.

        The array's memory keeps the mapping and `owner` alive, through any view or tensor made of it: `owner` loses
        this reference when the last of them dies.

        With `writable_flag` the array claims to be writable, for `torch.from_numpy`, which warns otherwise. The memory
        is read only all the same: writing to it kills the process with SIGSEGV.
        """
        _check_range(offset, nbytes, self.nbytes)
        return np.asarray(_Exposed(self._address + offset, nbytes, not writable_flag, self._bytes, owner))


class _Exposed:
    """Memory as numpy's array interface describes it, with what has to outlive the arrays over it."""

    __slots__ = ("__array_interface__", "_mapping", "_owner")

    def __init__(self, address: int, nbytes: int, read_only: bool, mapping: Bytes, owner: object | None) -> None:
        self.__array_interface__ = {"data": (address, read_only), "shape": (nbytes,), "typestr": "|u1", "version": 3}
        self._mapping = mapping
        self._owner = owner


def allocated_memfd(name: str, nbytes: int) -> tuple[int, int]:
    """Make a memfd of at least `nbytes` bytes, rounded up to the page, and allocate every page of it.

    Returns its descriptor, which the caller closes, and its size. It can take seals. The interpreter lock is not held
    meanwhile. Raises `MemoryUnavailable` if the system lacks the memory; nothing of it is kept then.
    """
    if nbytes <= 0:
        raise OutOfBounds(f"region {name!r}: nbytes must be positive, got {nbytes}")
    size = round_up(nbytes, mmap.PAGESIZE)
    if size > (available := available_bytes()):
        raise MemoryUnavailable(f"region {name!r}: {size} bytes asked for, {available} available on this machine")
    fd = _new_memfd(name)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        os.close(fd)
        raise _unavailable(name, size, error) from error
    return fd, size


def add_seals(fd: int, seals: int) -> None:
    """Seal the memfd `fd`. Doing so twice is harmless. Raises `MemorySealError` if it takes no more seals."""
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & seals == seals:
        return
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except OSError as error:
        raise MemorySealError(f"the memory behind descriptor {fd} cannot be sealed: {error.strerror}") from error


def check_sealed(fd: int, seals: int) -> int:
    """The size in bytes of the memfd `fd`. Raises `MemorySealError` if it is none, is empty or lacks one of `seals`."""
    try:
        present = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise MemorySealError(f"descriptor {fd} is not a memfd: {error.strerror}") from error
    if missing := seals & ~present:
        names = ", ".join(name for bit, name in _SEAL_NAMES.items() if bit & missing)
        raise MemorySealError(f"the memory behind descriptor {fd} must be sealed, and lacks {names}")
    size = os.fstat(fd).st_size
    if size == 0:
        raise MemorySealError(f"the memory behind descriptor {fd} is empty")
    return size


def sealed_copy(name: str, parts: Sequence[Buffer]) -> tuple[int, list[int]]:
    """Copy `parts` into a new memfd that nobody, the caller included, can change, resize or unseal.

    Returns its descriptor, which the caller closes, and the offset of each part in bytes, a multiple of 64. The file
    is a whole number of pages, at least one. Each part is a C-contiguous buffer and may be empty; it is copied once,
    straight into the file's pages and without the interpreter lock. Raises `MemoryUnavailable` if memory is short.
    """
    views = [memoryview(part) for part in parts]
    offsets: list[int] = []
    end = 0
    for view in views:
        offsets.append(end)
        end = round_up(end + view.nbytes, PART_ALIGNMENT)
    size = round_up(max(end, 1), mmap.PAGESIZE)
    fd = _new_memfd(name)
    try:
        os.ftruncate(fd, size)
        for view, offset in zip(views, offsets, strict=True):
            _write_all(fd, view, offset)
        add_seals(fd, SEALS_FROZEN)
    except OSError as error:
        os.close(fd)
        raise _unavailable(name, size, error) from error
    except BaseException:
        os.close(fd)
        raise
    return fd, offsets


def available_bytes() -> int:
    """What /proc/meminfo says new allocations can have without swapping.

    Asked for before a large memory is touched: the kernel would otherwise kill a process instead of refusing.
    """
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise MemoryUnavailable("/proc/meminfo does not say how much memory is available")


def round_up(nbytes: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `nbytes`."""
    return -(-nbytes // multiple) * multiple


def _write_all(fd: int, view: memoryview, offset: int) -> None:
    if view.nbytes == 0:
        return
    written = os.pwrite(fd, view, offset)
    if written < view.nbytes:  # one call moves at most 2 GiB
        _write_all(fd, view.cast("B")[written:], offset + written)


def _new_memfd(name: str) -> int:
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise _unavailable(name, 0, error) from error


def _unavailable(name: str, nbytes: int, error: OSError) -> MemoryUnavailable:
    code = errno.errorcode.get(error.errno or 0, "unknown")
    return MemoryUnavailable(f"memory {name!r} of {nbytes} bytes: {error.strerror} ({code})")


def _check_range(offset: int, nbytes: int, limit: int) -> None:
    if offset < 0 or nbytes < 0 or offset + nbytes > limit:
        raise OutOfBounds(f"bytes {offset} to {offset + nbytes} are outside a region of {limit} bytes")
