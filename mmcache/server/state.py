"""The state folder: what a sidecar keeps between runs."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mmcache.errors import ConfigError

_SEED = re.compile(rb"[0-9a-f]{16}\n")


@dataclass(frozen=True, slots=True)
class StateFolder:
    """A state folder that exists, belongs to this user and is writable by nobody else."""

    path: Path

    @property
    def seed_file(self) -> Path:
        """Where the key seed lies."""
        return self.path / "seed"

    @property
    def digests_file(self) -> Path:
        """Where digests of weights are kept; may be removed at any time."""
        return self.path / "digests.json"

    @property
    def calibrations_file(self) -> Path:
        """Where measured costs are kept; may be removed at any time."""
        return self.path / "calibrations.json"


def prepare_state(path: Path) -> StateFolder:
    """Create the folder with mode 0700 if it is missing, and check who may change it.

    Raises:
        ConfigError: it cannot be created, is not a folder, belongs to another user, or others may write to it.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.stat()
    except OSError as error:
        raise ConfigError(f"state = {path}: must be a folder that can be created: {error.strerror}") from None
    if info.st_uid != os.geteuid():
        raise ConfigError(f"state = {path}: must belong to the sidecar's user {os.geteuid()}, not to {info.st_uid}")
    if info.st_mode & 0o022:
        raise ConfigError(f"state = {path}: must not be writable by group or others: chmod go-w {path}")
    return StateFolder(path)


def load_or_create_seed(folder: StateFolder) -> int:
    """The secret of 64 bits behind every content key, created on first use; starters that race agree on one.

    Raises:
        ConfigError: the file cannot be read or made, is malformed, not this user's, or open to group or others.
    """
    try:
        with _locked(folder.path):
            if not os.path.lexists(folder.seed_file):
                _write_seed(folder)
            return _read_seed(folder.seed_file)
    except OSError as error:
        raise ConfigError(f"seed file {folder.seed_file}: must be readable or creatable: {error.strerror}") from None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write_seed(folder: StateFolder) -> None:
    # One fixed name for the half-written file: the next starter overwrites what a killed one left.
    unfinished = folder.path / "seed.new"
    unfinished.unlink(missing_ok=True)
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secrets.token_hex(8).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(folder.seed_file)


def _read_seed(path: Path) -> int:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
            raise ConfigError(f"seed file {path}: must be a regular file of the sidecar's user")
        if info.st_mode & 0o077:
            raise ConfigError(f"seed file {path}: must not be open to group or others: chmod 600 {path}")
        content = file.read(64)
    if not _SEED.fullmatch(content):
        raise ConfigError(f"seed file {path}: must hold 16 hex digits and a newline")
    return int(content, 16)
