"""What was found out before and is known again after a restart: a small file in the state folder."""

from __future__ import annotations

import json
import logging
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from mmcache.keys import checksum

log = logging.getLogger(__name__)

VERSION = 1
MAX_ENTRIES = 16
MAX_BYTES = 4096
_HEX = re.compile(r"[0-9a-f]{32}")

T = TypeVar("T")


class StateCache(Generic[T]):
    """Whatever is wrong with the file makes it empty, and nothing else. It may be removed at any time.

    Attributes:
        known: a value by an identity of 32 hex digits; the oldest first.
    """

    def __init__(self, path: Path, what: str, check: Callable[[object], T]) -> None:
        """`what`: is kept, in one word. `check`: returns a value as it was read, or raises `ValueError`."""
        self._path = path
        self._what = what
        self._check = check
        self.known: dict[str, T] = {}

    def load(self) -> None:
        """Read the file, if it is there, this user's alone, and whole."""
        try:
            self.known = self._parsed(_read_own(self._path))
        except FileNotFoundError:
            self.known = {}
        except (OSError, ValueError, RecursionError) as error:
            log.warning("%s is not used: %s", self._path, error)
            self.known = {}

    def add(self, identity: str, value: T) -> None:
        """Remember a value and write the file, if this is new. A failure to write is logged: nothing depends on it."""
        if self.known.get(identity) == value:
            return
        self.known.pop(identity, None)
        self.known[identity] = value
        while len(self.known) > MAX_ENTRIES:
            del self.known[next(iter(self.known))]
        try:
            self._write()
        except OSError as error:
            log.warning("%s cannot be written: %s", self._path, error.strerror)

    def _write(self) -> None:
        # One fixed name for the half-written file: the next writer overwrites what a killed one left.
        unfinished = self._path.with_name(self._path.name + ".new")
        unfinished.unlink(missing_ok=True)
        fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="ascii") as file:
            json.dump({"version": VERSION, self._what: self.known, "checksum": _checksum(self.known)}, file)
        unfinished.rename(self._path)

    def _parsed(self, text: str) -> dict[str, T]:
        data = json.loads(text)
        entries = data.get(self._what) if isinstance(data, dict) and data.get("version") == VERSION else None
        if not isinstance(entries, dict) or len(entries) > MAX_ENTRIES:
            raise ValueError("it is not of this version, or damaged")
        if not all(_HEX.fullmatch(identity) for identity in entries):
            raise ValueError(f"it holds something else than {self._what}")
        if data.get("checksum") != _checksum(entries):
            raise ValueError("it is damaged")
        return {identity: self._check(value) for identity, value in entries.items()}


def is_hex_digest(value: object) -> bool:
    """Whether it is 32 hex digits."""
    return isinstance(value, str) and _HEX.fullmatch(value) is not None


def _read_own(path: Path) -> str:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
            raise ValueError("it is not a file of this user alone")
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES} bytes")
    return content.decode("ascii")


def _checksum(entries: object) -> str:
    return f"{checksum(json.dumps(entries, sort_keys=True).encode()):016x}"
