"""What tells one state of a checkpoint's files from another without reading them. Free of torch."""

import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Final

from encoder.files import exists, unusable

SETTLED_NS: Final = 3_000_000_000
"""A file that changed less than this before it was read may change again within the same tick of its file system's
clock, unseen: the coarsest clock in use ticks every two seconds."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """One state of one file, as its file system tells it; times in nanoseconds of the Unix clock."""

    device: int
    inode: int
    nbytes: int
    modified_ns: int
    changed_ns: int

    def __bytes__(self) -> bytes:
        return repr(astuple(self)).encode()


def stamp_files(paths: Sequence[Path]) -> tuple[Stamp, ...]:
    """Return the state of each file, links followed. Raises `CheckpointError` naming a file that is missing."""
    try:
        states = [os.stat(path) for path in paths]
    except OSError as error:
        raise unusable(error.filename, error) from error
    return tuple(Stamp(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in states)


def stamp_present(paths: Sequence[Path]) -> tuple[Stamp | None, ...]:
    """Return the state of each file as `stamp_files` does, None for one that is not there."""
    return tuple(stamp_files([path])[0] if exists(path) else None for path in paths)


def are_settled(stamps: Sequence[Stamp], now_ns: int) -> bool:
    """Whether a change at `now_ns` or later shows in every stamp. A file from the future is never settled."""
    return all(max(stamp.modified_ns, stamp.changed_ns) + SETTLED_NS <= now_ns for stamp in stamps)
