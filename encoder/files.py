"""Opens a checkpoint's files: regular ones alone, never waiting for one, with every error a `CheckpointError`.

Free of torch: the coordinator reads settings.
"""

import json
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from encoder.errors import CheckpointError

MAX_JSON_BYTES: Final = 64 << 20
"""Of a settings file, an index, or the header of a file of tensors; that of 250,000 tensors takes half of it."""

MAX_PATH: Final = 10_000


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a regular file for reading and yield its descriptor.

    Raises `CheckpointError` naming the path: it is missing, no regular file (a pipe is not waited for), or not
    readable, also later within the `with`.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: no file can have such a name
        raise unusable(path, error) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CheckpointError(f"{path}: not a regular file")
        yield descriptor
    except OSError as error:
        raise unusable(path, error) from error
    finally:
        os.close(descriptor)


def unusable(path: object, error: Exception) -> CheckpointError:
    """Return what to raise of a path that the system refuses."""
    reason = error.strerror if isinstance(error, OSError) else error
    return CheckpointError(f"{shown(str(path), most=MAX_PATH)[1:-1]}: {reason}")


def exists(path: Path) -> bool:
    """Whether there is a file, links followed. Raises `CheckpointError` if that cannot be told."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise unusable(path, error) from error
    return True


def read_json(path: Path) -> Mapping[str, Any]:
    """Return the JSON object in a file. Raises `CheckpointError` naming the file if it does not hold one."""
    with opened(path) as descriptor:
        nbytes = os.fstat(descriptor).st_size
        if nbytes > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: {nbytes} bytes, more than {MAX_JSON_BYTES}")
        content = read_at(descriptor, 0, MAX_JSON_BYTES + 1)
    return parse_json(content, path)


def parse_json(content: bytes, where: object) -> Mapping[str, Any]:
    """Return a JSON object. Raises `CheckpointError` if it is none, too large, or repeats a name."""
    if len(content) > MAX_JSON_BYTES:
        raise CheckpointError(f"{where}: more than {MAX_JSON_BYTES} bytes of JSON")
    try:
        data = json.loads(content.decode(), object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{where}: expected a JSON object")
    return data


def read_at(descriptor: int, start: int, nbytes: int) -> bytes:
    """Return so many bytes of a file, fewer if it ends before."""
    parts = []
    while nbytes and (part := os.pread(descriptor, min(nbytes, 1 << 20), start)):
        parts.append(part)
        start, nbytes = start + len(part), nbytes - len(part)
    return b"".join(parts)


def shown(value: object, most: int = 200) -> str:
    """Return how an error shows a value that it found: whole if it is short."""
    try:
        text = repr(value)
    except RecursionError:
        return f"a {type(value).__name__} of great depth"
    return text if len(text) <= most else f"{text[:most]}..."


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"repeated: {shown(name)}")
    return found
