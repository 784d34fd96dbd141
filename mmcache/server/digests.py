"""Digests of weights that were loaded before, by the identity of their files, so that a restart need not make them."""

from __future__ import annotations

import json
import logging
import os
import re
import stat
from pathlib import Path

from mmcache.keys import checksum

log = logging.getLogger(__name__)

VERSION = 1
MAX_ENTRIES = 16
MAX_BYTES = 4096
_HEX = re.compile(r"[0-9a-f]{32}")


class DigestCache:
    """A small file in the state folder. Whatever is wrong with it makes it empty, and nothing else.

    Attributes:
        known: digest by identity of the files, both 32 hex digits; the oldest first.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.known: dict[str, str] = {}

    def load(self) -> None:
        """Read the file, if it is there, this user's alone, and whole."""
        try:
            self.known = _parsed(_read_own(self._path))
        except FileNotFoundError:
            self.known = {}
        except (OSError, ValueError, RecursionError) as error:
            log.warning("%s is not used: %s", self._path, error)
            self.known = {}

    def add(self, identity: str, digest: str) -> None:
        """Remember a digest and write the file, if this is new. A failure to write is logged: nothing depends on it."""
        if self.known.get(identity) == digest:
            return
        self.known.pop(identity, None)
        self.known[identity] = digest
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
            json.dump({"version": VERSION, "digests": self.known, "checksum": _checksum(self.known)}, file)
        unfinished.rename(self._path)


def _read_own(path: Path) -> str:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
            raise ValueError("it is not a file of this user alone")
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES} bytes")
    return content.decode("ascii")


def _parsed(text: str) -> dict[str, str]:
    data = json.loads(text)
    digests = data.get("digests") if isinstance(data, dict) and data.get("version") == VERSION else None
    if not isinstance(digests, dict) or len(digests) > MAX_ENTRIES:
        raise ValueError("it is not of this version, or damaged")
    if not all(isinstance(part, str) and _HEX.fullmatch(part) for pair in digests.items() for part in pair):
        raise ValueError("it holds something else than digests")
    if data.get("checksum") != _checksum(digests):
        raise ValueError("it is damaged")
    return digests


def _checksum(digests: dict[str, str]) -> str:
    return f"{checksum(json.dumps(digests, sort_keys=True).encode()):016x}"
