"""The `mmcache` command."""

from __future__ import annotations

import sys

INTERRUPTED = 130


def main() -> None:
    """Entry point. Exit status: 0 done, 1 it failed, 2 a setting or the call was wrong, 130 Ctrl-C."""
    try:
        status = _run()
    except KeyboardInterrupt:  # also while a command is still being imported, which takes a second at times
        status = INTERRUPTED
    sys.exit(status)


def _run() -> int:
    try:
        import click  # noqa: F401
        import rich  # noqa: F401
    except ImportError as error:
        sys.exit(f"mmcache: the commands need `pip install 'mmcache[cli]'` ({error})")
    from mmcache.cli.app import run

    return run()
