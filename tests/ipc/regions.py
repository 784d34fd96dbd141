"""Regions for tests, and which descriptors of them are open."""

from __future__ import annotations

import contextlib
import mmap
import os

import numpy as np

from ipc.memory_shm import (
    ReadOnlyRegion,
    SharedRegion,
)


def descriptors(name: str) -> list[str]:
    """The open descriptors of the memfds of that name."""
    links = []
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own descriptor
            links.append(os.readlink(entry.path))
    return [link for link in links if link.startswith(f"/memfd:{name} ")]


def readers_region(name: str = "readers") -> tuple[SharedRegion, ReadOnlyRegion]:
    region = SharedRegion.create(name, 3 * mmap.PAGESIZE)
    region.array(0, region.nbytes)[:] = np.arange(region.nbytes, dtype=np.uint8)
    region.seal_for_readers()
    return region, ReadOnlyRegion.attach(region.fd)
