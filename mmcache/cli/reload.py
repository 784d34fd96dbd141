"""`mmcache reload`: new weights at run time."""

from __future__ import annotations

from pathlib import Path

import click

from mmcache.cli.options import talks_to_sidecar
from mmcache.client import connect

TIMEOUT_S = 660.0
"""Longer than the sidecar gives its ranks, so that it can say which of them failed."""


@click.command(context_settings={"default_map": {"timeout": TIMEOUT_S}})
@click.option(
    "--model",
    metavar="PATH|PRESET",
    help="A checkpoint folder or a preset; by default the one that is served, read anew.",
)
@talks_to_sidecar
def reload(model: str | None, socket: Path | None, timeout: float) -> None:
    """Serve new weights without losing a request.

    Every rank loads them beside the old ones, which are served until all have: both are in memory for a while. If one
    cannot load them, all stays as it was and the exit status is 1, or 2 if there is no such model or its settings are
    wrong. A reload that outlives --timeout goes on.
    """
    with connect(socket, timeout=timeout) as client:
        before = client.fingerprint
        fingerprint = client.reload(model)
    if fingerprint == before:
        click.echo(f"the same weights as before: fingerprint {fingerprint}")
    else:
        click.echo(f"new weights are served: fingerprint {fingerprint} (was {before})")
