"""The `mmcache` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point. Exit status: 0 done, 1 it failed, 2 it was called wrongly or a setting is wrong."""
    try:
        import click  # noqa: F401
        import rich  # noqa: F401
    except ImportError as error:
        sys.exit(f"mmcache: the commands need `pip install 'mmcache[cli]'` ({error})")
    from mmcache.cli.app import run

    sys.exit(run())
