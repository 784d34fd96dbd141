"""How much host memory a process may still take: by its own limits, and by those of the control groups it is in."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

PROCESS = Path("/proc/self")
GROUPS = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60
"""What the older control groups say where there is no limit is more than this."""


def free_host_bytes(num_sharing: int, process: Path = PROCESS, groups: Path = GROUPS) -> int | None:
    """Bytes that this process may still take; None if nothing limits it but the machine.

    `num_sharing`: processes that share what is free in a control group equally. `process` and `groups`: where the
    kernel tells of both.
    """
    found = [*_left_by_process(process), *(free // num_sharing for free in _left_by_groups(process, groups))]
    return max(0, min(found)) if found else None


def _left_by_process(process: Path) -> Iterator[int]:
    """Of address space and of private memory: what is limited, less what is taken."""
    sizes = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    for limit, taken in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            yield soft - 1024 * int(sizes[taken].split()[0])


def _left_by_groups(process: Path, groups: Path) -> Iterator[int]:
    """Of each group that the process is in, and of those around it. What is gone meanwhile, or not shown, limits not"""
    try:
        lines = (process / "cgroup").read_text().splitlines()
    except OSError:  # a kernel without control groups
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        is_old = "memory" in controllers.split(",")
        if not is_old and controllers:
            continue
        root = groups / "memory" if is_old else groups
        inner = root / path.lstrip("/")
        for folder in (inner, *inner.parents):
            with contextlib.suppress(OSError, ValueError):  # "max" is no number
                yield from _left_by_group(folder, is_old)
            if folder == root:
                break


def _left_by_group(folder: Path, is_old: bool) -> Iterator[int]:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if is_old else ("memory.max", "memory.current")
    limit, taken = (int((folder / name).read_text()) for name in names)
    if limit < UNLIMITED:
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        prefix = "total_" if is_old else ""
        cached = sum(int(counts[f"{prefix}{name}"]) for name in ("active_file", "inactive_file"))
        yield limit - taken + cached  # the kernel takes what is cached of files back before it refuses
