"""`mmcache stats`: the sidecar's counters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click

from mmcache.cli.options import talks_to_sidecar
from mmcache.client import connect


@click.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON, nested, numbers as numbers.")
@talks_to_sidecar
def stats(as_json: bool, socket: Path | None, timeout: float) -> None:
    """Show what the sidecar has served, holds and waits for."""
    with connect(socket, timeout=timeout) as client:
        counters = client.stats()
    if as_json:
        click.echo(json.dumps(counters, indent=2))
        return
    for line in _lines(counters):
        click.echo(line)


def _lines(counters: dict[str, object]) -> Iterator[str]:
    """Plain values first, then a block a section."""
    for name, value in counters.items():
        if not isinstance(value, dict):
            yield f"{name.replace('_', ' '):<20} {_shown(name, value)}"
    for name, section in counters.items():
        if isinstance(section, dict):
            yield ""
            yield name
            yield from _section(section, "  ")


def _section(section: dict[str, object], indent: str) -> Iterator[str]:
    for key, value in section.items():
        if isinstance(value, dict):
            yield f"{indent}{key.replace('_', ' ')}"
            yield from _section(value, indent + "  ")
        else:
            yield f"{indent}{key.replace('_', ' '):<{20 - len(indent)}} {_shown(key, value)}"
    if not section:
        yield f"{indent}none"


def _shown(name: str, value: object) -> str:
    if isinstance(value, int) and name.startswith("bytes"):
        return f"{value / (1 << 20):,.1f} MiB"
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) and name != "pid" else str(value)
