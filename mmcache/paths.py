"""Where things lie when nobody says: rules shared by the sidecar, every command and the client."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

PREFIX = "MMCACHE_"
MAX_SOCKET_BYTES = 107  # sun_path holds 108 with its final zero


def check_socket(path: Path) -> Path:
    """`path` made absolute. Raises ValueError when it is longer than a Unix socket's address can be."""
    path = path.expanduser().absolute()
    if (length := len(os.fsencode(path))) > MAX_SOCKET_BYTES:
        raise ValueError(f"a Unix socket path has at most {MAX_SOCKET_BYTES} bytes, this one has {length}")
    return path


def default_state(environ: Mapping[str, str]) -> Path:
    """The state folder when none is named: $MMCACHE_STATE, $XDG_STATE_HOME/mmcache or ~/.local/state/mmcache."""
    if named := environ.get(f"{PREFIX}STATE"):
        return Path(named).expanduser().absolute()
    home = Path(environ["HOME"]) if environ.get("HOME") else Path.home()
    return (_xdg(environ, "XDG_STATE_HOME") or home / ".local" / "state") / "mmcache"


def default_socket(environ: Mapping[str, str]) -> Path:
    """The socket when none is named, the same for `serve`, every command and `connect()`.

    $MMCACHE_SOCKET, else $XDG_RUNTIME_DIR/mmcache.sock, else mmcache.sock in `default_state`. It depends on the
    environment alone, because a client cannot know a sidecar's flags. Not checked for length: see `check_socket`.
    """
    if named := environ.get(f"{PREFIX}SOCKET"):
        return Path(named).expanduser().absolute()
    return (_xdg(environ, "XDG_RUNTIME_DIR") or default_state(environ)) / "mmcache.sock"


def _xdg(environ: Mapping[str, str], name: str) -> Path | None:
    value = environ.get(name, "")
    return Path(value) if os.path.isabs(value) else None  # its specification has relative ones ignored
