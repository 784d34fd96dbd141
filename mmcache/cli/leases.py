"""`mmcache leases`: who holds what since when, and what is quarantined and why."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from mmcache.cli.options import talks_to_sidecar
from mmcache.client import connect

MAX_LISTED = 10_000
KEY_PREFIX = 12
NAME_CHARS = 32


@click.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON, with everything that the sidecar says.")
@click.option(
    "--limit",
    type=click.IntRange(0, MAX_LISTED),
    default=100,
    show_default=True,
    metavar="N",
    help="List at most N leases, the oldest first; all are counted.",
)
@click.option("--pid", type=click.IntRange(min=0), help="Only what this process holds.")
@click.option(
    "--check", is_flag=True, help="Let the sidecar look whether its books agree; the exit status is 1 if they do not."
)
@talks_to_sidecar
def leases(as_json: bool, limit: int, pid: int | None, check: bool, socket: Path | None, timeout: float) -> int:
    """Show who holds which embeddings since when.

    A lease is held until its process acknowledges it or dies. Quarantined is what is held by a process that closed its
    connection and lives, or for longer than the sidecar's lease-limit-s; WHY says which. Besides its leases a process
    keeps embeddings for others (FOR OTHERS): offered are shares that nobody has claimed yet, staged are embeddings of
    staged pixels some of whose consumers have not come.
    """
    with connect(socket, name="mmcache leases", timeout=timeout) as client:
        found = client.leases(limit, pid=pid, check=check)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        for line in _lines(found):
            click.echo(line)
    for problem in found["problems"]:
        click.echo(f"mmcache: {problem}", err=True)
    if check and not as_json and not found["problems"]:
        click.echo("\nthe books agree")
    return 1 if found["problems"] else 0


def _lines(found: dict[str, Any]) -> Iterator[str]:
    holders = [row for row in found["holders"] if row["leases"] or row["kept"] or row["bytes_staged"]]
    if not holders:
        yield "nothing is held"
        return
    yield from _table(
        ("HOLDER", "PID", "STATE", "LEASES", "FOR OTHERS", "MIB", "OLDEST", "QUARANTINED", "STAGED MIB", "WHY"),
        [
            (
                _name(row["name"]), str(row["pid"]), row["state"], f"{row['leases']:,}", f"{row['kept']:,}",
                _mib(row["bytes_held"]), _age(row["oldest_seconds"]), f"{row['quarantined']:,}",
                _mib(row["bytes_staged"]), row["why"],
            )
            for row in holders
        ],
    )  # fmt: skip
    if embeddings := sorted(found["leases"] + found["kept"], key=lambda row: -row["seconds"]):
        yield ""
        yield from _table(
            ("KEY", "POOL", "TOKENS", "MIB", "SINCE", "STATE", "PID", "HOLDER"),
            [
                (
                    row["key"][:KEY_PREFIX], str(row["pool"]), f"{row['tokens']:,}", _mib(row["bytes"]),
                    _age(row["seconds"]), row["state"], str(row["pid"]), _name(row["holder"]),
                )
                for row in embeddings
            ],
        )  # fmt: skip
    for what, shown in (("leases", "leases"), ("kept", "embeddings kept for others")):
        if (hidden := sum(row[what] for row in holders) - len(found[what])) > 0:
            yield f"and {hidden:,} younger {shown} (--limit)"
    quarantined = found["quarantined"]
    if quarantined["leases"] or quarantined["bytes_staged"]:
        staged = f"; {_mib(quarantined['bytes_staged'])} MiB staged" if quarantined["bytes_staged"] else ""
        yield ""
        yield f"quarantined: {quarantined['leases']:,} leases, {_mib(quarantined['bytes'])} MiB{staged}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns as wide as they need to be; numbers to the right, words to the left."""
    widths = [max(len(row[place]) for row in (heads, *rows)) for place in range(len(heads))]
    is_number = [all(row[place][:1].isdigit() for row in rows) and heads[place] != "KEY" for place in range(len(heads))]
    for row in (heads, *rows):
        cells = zip(row, widths, is_number, strict=True)
        yield "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in cells).rstrip()


def _name(name: str) -> str:
    """As its client calls itself: nothing that a terminal would obey."""
    shown = "".join(char if char.isprintable() else "?" for char in name) or "-"
    return shown if len(shown) <= NAME_CHARS else f"{shown[: NAME_CHARS - 1]}…"


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.1f}"


def _age(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"
