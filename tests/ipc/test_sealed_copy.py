"""What a sender's descriptor has to promise, and how one is made."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from ipc.errors import MemorySealError
from ipc.memory_shm import (
    SEAL_GROW,
    SEAL_SHRINK,
    SEAL_WRITE,
    SEALS_FROZEN,
    ReadOnlyRegion,
    SharedRegion,
    check_sealed,
    sealed_copy,
)
from tests.ipc.regions import descriptors


def test_sealed_copy_places_parts_on_64_bytes() -> None:
    picture = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    parts = [b"abc", b"", picture, memoryview(bytearray(5000))]
    fd, offsets = sealed_copy("parts", parts)
    try:
        assert offsets == [0, 64, 64, 128]
        reader = ReadOnlyRegion.attach(fd, SEALS_FROZEN)
        assert reader.nbytes == check_sealed(fd, SEALS_FROZEN) == 2 * mmap.PAGESIZE
        for part, offset in zip(parts, offsets, strict=True):
            data = memoryview(part)
            assert bytes(reader.view(offset, data.nbytes)) == data.tobytes()
    finally:
        os.close(fd)


@pytest.mark.parametrize("parts", [[], [b""], [b"", np.zeros((0, 3), np.uint8)]])
def test_sealed_copy_of_nothing_is_one_page(parts: list[object]) -> None:
    fd, offsets = sealed_copy("nothing", parts)  # type: ignore[arg-type]
    assert offsets == [0] * len(parts)
    assert check_sealed(fd, SEALS_FROZEN) == mmap.PAGESIZE
    os.close(fd)


def test_sealed_copy_cannot_be_changed_by_its_maker() -> None:
    fd, _ = sealed_copy("frozen", [b"abc"])
    try:
        for change in (lambda: os.pwrite(fd, b"x", 0), lambda: os.ftruncate(fd, 0)):
            with pytest.raises(PermissionError):
                change()
        with pytest.raises(PermissionError):
            mmap.mmap(fd, mmap.PAGESIZE, flags=mmap.MAP_SHARED)
        assert bytes(ReadOnlyRegion.attach(fd).view(0, 3)) == b"abc"
    finally:
        os.close(fd)


def test_sealed_copy_of_a_strided_array_is_refused_and_leaves_nothing() -> None:
    with pytest.raises((BufferError, ValueError), match="contiguous"):
        sealed_copy("strided", [np.zeros((4, 4), np.uint8)[:, ::2]])
    assert descriptors("strided") == []


def test_check_sealed_names_what_is_missing() -> None:
    region = SharedRegion.create("partly", 1)
    with pytest.raises(MemorySealError, match="lacks SHRINK, GROW, WRITE"):
        check_sealed(region.fd, SEAL_SHRINK | SEAL_GROW | SEAL_WRITE)
    assert check_sealed(region.fd, 0) == mmap.PAGESIZE


def test_check_sealed_refuses_what_is_no_memfd(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    pipe = os.pipe()
    empty = os.memfd_create("empty", os.MFD_ALLOW_SEALING)
    try:
        for descriptor in (fd, pipe[0], 10**6):
            with pytest.raises(MemorySealError, match="not a memfd"):
                check_sealed(descriptor, 0)
        with pytest.raises(MemorySealError, match="empty"):
            check_sealed(empty, 0)
    finally:
        for descriptor in (fd, empty, *pipe):
            os.close(descriptor)
