"""Regions of a memfd: what a reader may not do, and what keeps a mapping alive."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import signal
import subprocess
import sys
import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from ipc.errors import MemorySealError, MemoryUnavailable, OutOfBounds
from ipc.memory_shm import (
    SEAL_WRITE,
    ReadOnlyRegion,
    SharedRegion,
    available_bytes,
)
from tests.ipc.regions import descriptors, readers_region

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
LIBC.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]
PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01
MADV_REMOVE = 9


class Owner:
    """Something whose death can be watched."""


def is_mapped(name: str) -> bool:
    return f"memfd:{name} " in Path("/proc/self/maps").read_text()


def test_writer_and_reader_share_memory_after_sealing() -> None:
    region, reader = readers_region()
    view = reader.view(100, 4)
    assert view.tolist() == [100, 101, 102, 103]
    region.array(100, 2)[:] = 7
    assert view.tolist() == [7, 7, 102, 103]
    assert reader.nbytes == region.nbytes == 3 * mmap.PAGESIZE


def test_size_is_rounded_up_to_the_page_and_every_page_is_allocated() -> None:
    region = SharedRegion.create("rounded", mmap.PAGESIZE + 1)
    assert region.nbytes == 2 * mmap.PAGESIZE
    assert os.fstat(region.fd).st_blocks * 512 == region.nbytes
    assert not os.get_inheritable(region.fd)


def test_reader_cannot_map_for_writing() -> None:
    region, _ = readers_region()
    with pytest.raises(PermissionError):
        mmap.mmap(region.fd, region.nbytes, flags=mmap.MAP_SHARED)
    with pytest.raises(MemorySealError, match="sealed against writing"):
        SharedRegion.attach(region.fd)


def test_reader_cannot_make_its_mapping_writable() -> None:
    _, reader = readers_region()
    address = reader.view(0, 1).__array_interface__["data"][0]
    assert LIBC.mprotect(address, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE) == -1
    assert ctypes.get_errno() == errno.EACCES


def test_reader_cannot_write_through_a_reopened_descriptor() -> None:
    region, reader = readers_region()
    with pytest.raises(OSError, match="not permitted"):
        os.open(f"/proc/self/fd/{region.fd}", os.O_RDWR | os.O_TRUNC)
    reopened = os.open(f"/proc/self/fd/{region.fd}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            os.pwrite(reopened, b"x", 0)
        with pytest.raises(PermissionError):
            mmap.mmap(reopened, region.nbytes, flags=mmap.MAP_SHARED)
    finally:
        os.close(reopened)
    assert reader.view(0, 1)[0] == 0


def test_reader_cannot_write_through_proc_mem() -> None:
    _, reader = readers_region()
    view = reader.view(0, 1)
    memory = os.open("/proc/self/mem", os.O_RDWR)
    try:
        with pytest.raises(OSError):  # noqa: PT011 - EIO or EFAULT, by kernel
            os.pwrite(memory, b"x", view.__array_interface__["data"][0])
    finally:
        os.close(memory)
    assert view[0] == 0


def test_reader_cannot_write_truncate_grow_or_punch_holes() -> None:
    region, reader = readers_region()
    view = reader.view(mmap.PAGESIZE, 2)
    for change in (
        lambda: os.pwrite(region.fd, b"x", 0),
        lambda: os.ftruncate(region.fd, 0),
        lambda: os.ftruncate(region.fd, 10 * mmap.PAGESIZE),
    ):
        with pytest.raises(PermissionError):
            change()
    assert LIBC.fallocate(region.fd, PUNCH_HOLE_KEEP_SIZE, 0, region.nbytes) == -1
    assert ctypes.get_errno() == errno.EPERM
    address = reader.view(0, 1).__array_interface__["data"][0]
    assert LIBC.madvise(address, region.nbytes, MADV_REMOVE) == -1
    assert view.tolist() == [0, 1]


def test_seals_cannot_be_taken_back_and_sealing_twice_is_harmless() -> None:
    region, _ = readers_region()
    region.seal_for_readers()
    region.seal_resize()
    resizable = SharedRegion.create("resize-only", 1)
    resizable.seal_resize()
    with pytest.raises(MemorySealError, match="cannot be sealed"):
        resizable.seal_for_readers()


def test_reader_refuses_memory_that_could_shrink() -> None:
    region = SharedRegion.create("unsealed", 1)
    with pytest.raises(MemorySealError, match="SHRINK"):
        ReadOnlyRegion.attach(region.fd)
    with pytest.raises(MemorySealError, match="SHRINK"):
        SharedRegion.attach(region.fd)


def test_reader_can_ask_for_more_seals() -> None:
    region = SharedRegion.create("resize-only", 1)
    region.seal_resize()
    assert ReadOnlyRegion.attach(region.fd).nbytes == mmap.PAGESIZE
    with pytest.raises(MemorySealError, match="lacks WRITE"):
        ReadOnlyRegion.attach(region.fd, SEAL_WRITE)


def test_two_writers_share_a_resize_sealed_region() -> None:
    first = SharedRegion.create("ingest", mmap.PAGESIZE)
    first.seal_resize()
    second = SharedRegion.attach(first.fd, mmap.PAGESIZE)
    second.array(5, 1)[:] = 9
    assert first.array(5, 1)[0] == 9
    first.close()
    assert second.fd >= 0
    assert os.fstat(second.fd).st_size == mmap.PAGESIZE
    with pytest.raises(OutOfBounds, match="at least"):
        SharedRegion.attach(second.fd, mmap.PAGESIZE + 1)


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, -1), (0, 3 * mmap.PAGESIZE + 1), (3 * mmap.PAGESIZE, 1)])
def test_ranges_outside_are_refused(offset: int, nbytes: int) -> None:
    region, reader = readers_region()
    with pytest.raises(OutOfBounds):
        region.array(offset, nbytes)
    with pytest.raises(OutOfBounds):
        reader.view(offset, nbytes)


def test_empty_ranges_are_allowed() -> None:
    region, reader = readers_region()
    assert region.array(region.nbytes, 0).size == 0
    assert reader.view(region.nbytes, 0).size == 0


def test_more_memory_than_there_is_gives_one_clear_error() -> None:
    with pytest.raises(MemoryUnavailable, match=r"'huge'.*available"):
        SharedRegion.create("huge", 1 << 60)
    with pytest.raises(OutOfBounds, match="positive"):
        SharedRegion.create("nothing", 0)
    assert 0 < available_bytes() < 1 << 60


def test_a_view_keeps_the_mapping_alive_and_the_last_one_unmaps_it() -> None:
    region, reader = readers_region("lifetime")
    part = reader.view(64, 64)[8:16]
    own = region.array(0, 8)
    region.close()
    region.close()
    del region, reader
    gc.collect()
    assert part.tolist() == list(range(72, 80))
    own[:] = 3
    del own
    assert is_mapped("lifetime")
    del part
    assert not is_mapped("lifetime")
    assert descriptors("lifetime") == []


def test_a_closed_region_refuses_new_arrays() -> None:
    region = SharedRegion.create("closed", 1)
    region.close()
    with pytest.raises(OutOfBounds, match="closed"):
        region.array(0, 1)


def test_a_region_that_is_dropped_returns_its_descriptor() -> None:
    region = SharedRegion.create("dropped", 1)
    assert descriptors("dropped")
    del region
    gc.collect()
    assert descriptors("dropped") == []


def test_views_say_read_only_unless_asked_otherwise() -> None:
    _, reader = readers_region()
    view = reader.view(0, 8)
    assert not view.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        view.flags.writeable = True
    assert reader.view(0, 8, writable_flag=True).flags.writeable


def test_a_tensor_keeps_the_owner_until_its_storage_dies() -> None:
    _, reader = readers_region("tensors")
    owner = Owner()
    alive = weakref.ref(owner)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = torch.from_numpy(reader.view(64, 64, owner, writable_flag=True)).view(torch.bfloat16).reshape(4, 8)
    row = whole[2]
    del owner, whole, reader
    gc.collect()
    assert alive() is not None
    assert row.view(torch.uint8).tolist() == list(range(96, 112))
    del row
    assert alive() is None


def test_an_array_keeps_the_owner_through_slices_and_casts() -> None:
    _, reader = readers_region()
    owner = Owner()
    alive = weakref.ref(owner)
    part = reader.view(0, 64, owner).view(np.float32).reshape(4, 4)[1:, 2:].T
    del owner
    gc.collect()
    assert alive() is not None
    del part
    assert alive() is None


def test_writing_to_a_view_kills_the_process() -> None:
    script = (
        "from ipc.memory_shm import *; r = SharedRegion.create('crash', 1); r.seal_for_readers();"
        "v = ReadOnlyRegion.attach(r.fd).view(0, 8, writable_flag=True); print('before', flush=True); v[0] = 1"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=30)
    assert result.stdout == "before\n"
    assert result.returncode == -signal.SIGSEGV


def test_ipc_imports_no_torch() -> None:
    script = (
        "import sys, ipc, ipc.pool, ipc.memory_shm, ipc.control, ipc.leases, ipc.offers, ipc.staging, ipc.errors;"
        "print('torch' in sys.modules, any(name.split('.')[0] in ('mmcache', 'encoder') for name in sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=30)
    assert result.stdout.split() == ["False", "False"]
