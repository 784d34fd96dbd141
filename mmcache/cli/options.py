"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from mmcache.handshake import DEFAULT_TIMEOUT_S

F = TypeVar("F", bound=Callable[..., Any])


def talks_to_sidecar(command: F) -> F:
    """Adds --socket and --timeout."""
    command = click.option(
        "--timeout",
        type=click.FloatRange(min=0, min_open=True),
        default=DEFAULT_TIMEOUT_S,
        show_default=True,
        help="Longest wait for one call, in seconds.",
    )(command)
    return click.option(
        "--socket",
        type=click.Path(path_type=Path),
        help="The sidecar's socket; by default $MMCACHE_SOCKET, else where `mmcache serve` puts it.",
    )(command)
