"""`mmcache encode`: embeddings of image files, on the screen as rows and on disk as safetensors."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import click

from mmcache.cli.options import talks_to_sidecar
from mmcache.client import Client, connect
from mmcache.encode_call import Priority
from mmcache.errors import ItemError
from mmcache.lease import Lease

BATCH = 32
KEY_PREFIX = 12


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE|- ...")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write each embedding to DIR/NAME.safetensors; equal names get the key's prefix.",
)
@click.option(
    "--priority",
    type=click.Choice(get_args(Priority)),
    default="interactive",
    show_default=True,
    help="bulk: in what time interactive requests leave.",
)
@talks_to_sidecar
def encode(files: Sequence[str], out: Path | None, priority: Priority, socket: Path | None, timeout: float) -> int:
    """Encode image FILEs; - reads one image from standard input.

    Prints a row an image: source, tokens, key prefix, origin (encoded, pool, store). A file that fails is reported
    and the rest goes on; the exit status is 1 then.
    """
    names = _out_names(files)
    if out is not None:
        _make_folder(out)
    started = time.perf_counter()
    origins: Counter[str] = Counter()
    with connect(socket, timeout=timeout) as client:
        for start in range(0, len(files), BATCH):
            batch = files[start : start + BATCH]
            results: list[Any] = client.encode([_item(file) for file in batch], errors="return", priority=priority)
            for file, name, result in zip(batch, names[start:], results, strict=False):
                origins[_report(client, file, name, result, out)] += 1
    took_ms = (time.perf_counter() - started) * 1000
    counts = ", ".join(f"{count} {origin}" for origin, count in origins.items())
    click.echo(f"{len(files)} images in {took_ms:.0f} ms: {counts}", err=True)
    return 1 if origins["failed"] else 0


def _make_folder(out: Path) -> None:
    from safetensors.torch import save  # noqa: F401 - loaded before the clock runs

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.ClickException(f"{out} cannot be created: {error.strerror}") from error


def _item(file: str) -> bytes | str:
    return sys.stdin.buffer.read() if file == "-" else file


def _out_names(files: Sequence[str]) -> list[tuple[str, bool]]:
    """For each file its stem, and whether another file has the same."""
    stems = ["stdin" if file == "-" else Path(file).stem for file in files]
    counts = Counter(stems)
    return [(stem, counts[stem] > 1) for stem in stems]


def _report(client: Client, file: str, name: tuple[str, bool], result: Lease | ItemError, out: Path | None) -> str:
    if isinstance(result, ItemError):
        click.echo(f"{file}  {type(result).__name__}: {result.reason}", err=True)
        return "failed"
    with result as lease:
        click.echo(f"{file}  {lease.num_tokens} tokens  {str(lease.key)[:KEY_PREFIX]}  {lease.origin}")
        if out is not None:
            stem, is_shared = name
            suffix = f"-{str(lease.key)[:KEY_PREFIX]}" if is_shared else ""
            _write(client, lease, file, out / f"{stem}{suffix}.safetensors")
        return lease.origin


def _write(client: Client, lease: Lease, source: str, path: Path) -> None:
    """Write one embedding; the file appears whole or not at all."""
    from safetensors.torch import save

    metadata = {
        "source": source,
        "key": str(lease.key),
        "fingerprint": str(lease.fingerprint),
        "grid_thw": ",".join(map(str, lease.grid_thw)),
    }
    embedding = client.fetch(lease) if lease.is_on_device else lease.tensor  # a context would cost more than the copy
    data = save({"embedding": embedding}, metadata)
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(data)
        os.replace(file.name, path)
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror}") from error
