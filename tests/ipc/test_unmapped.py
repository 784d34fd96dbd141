"""Memory that its owner hands on without mapping it: whole, fixed in size, given back page by page or at once."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from ipc.errors import MemoryUnavailable, OutOfBounds
from ipc.memory_shm import SEALS_RESIZE, SharedRegion, check_sealed
from ipc.unmapped import UnmappedMemory

PAGE = mmap.PAGESIZE


def bytes_allocated(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_every_page_is_there_and_none_is_mapped_here() -> None:
    memory = UnmappedMemory.create("unmapped-test", 3 * PAGE + 1)
    assert (memory.nbytes, bytes_allocated(memory.fd)) == (4 * PAGE, 4 * PAGE)
    assert check_sealed(memory.fd, SEALS_RESIZE) == 4 * PAGE
    assert "unmapped-test" not in Path("/proc/self/maps").read_text()
    region = SharedRegion.attach(memory.fd)
    region.array(0, 3)[:] = 7
    assert os.pread(memory.fd, 4, 0) == b"\7\7\7\0"
    region.close()
    memory.close()


def test_pages_that_are_given_back_are_gone_for_everybody_and_others_stay() -> None:
    memory = UnmappedMemory.create("unmapped-test", 8 * PAGE)
    region = SharedRegion.attach(memory.fd)
    region.array(0, 8 * PAGE)[:] = 7
    given = memory.give_back([(0, PAGE), (2 * PAGE + 1, 2 * PAGE), (6 * PAGE - 1, PAGE), (7 * PAGE, 0)])
    assert given == 2 * PAGE, "the first, and the one that lies wholly in the second run; a page in no run whole stays"
    assert bytes_allocated(memory.fd) == 6 * PAGE
    gone = [not region.array(page * PAGE, PAGE).any() for page in range(8)]
    assert gone == [True, False, False, True, False, False, False, False]
    assert (region.array(4 * PAGE, 4 * PAGE) == 7).all()
    assert memory.give_back([(3 * PAGE, PAGE)]) == PAGE, "again is harmless"
    region.close()
    memory.close()
    assert memory.give_back([(4 * PAGE, PAGE)]) == 0, "it is closed"


def test_it_closes_its_descriptor_once_and_when_it_is_dropped() -> None:
    memory = UnmappedMemory.create("unmapped-test", PAGE)
    fd = memory.fd
    memory.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    other = os.memfd_create("other")
    memory.close()
    os.fstat(other)  # whoever has its number now keeps it
    os.close(other)
    dropped = UnmappedMemory.create("unmapped-test", PAGE).fd
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(dropped)


def test_what_the_machine_does_not_have_is_refused() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MemoryUnavailable, match="available on this machine"):
        UnmappedMemory.create("unmapped-test", 1 << 50)
    with pytest.raises(OutOfBounds, match="positive"):
        UnmappedMemory.create("unmapped-test", 0)
    assert len(os.listdir("/proc/self/fd")) == before
