"""`mmcache serve`: run a sidecar."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mmcache._version import __version__
from mmcache.config import Settings
from mmcache.config_sources import load_settings
from mmcache.redaction import redacted
from mmcache.server.logs import configure

if TYPE_CHECKING:
    from mmcache.server.coordinator import Coordinator

log = logging.getLogger(__name__)

SIZE_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def _setting_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """A flag for every setting; the settings themselves know their defaults and rules."""
    for name, field in reversed(Settings.model_fields.items()):
        default = field.default
        text = f"{field.description}"
        if field.default is not None and not field.is_required():
            shown = readable_size(default) if isinstance(default, int) and name.endswith("_bytes") else default
            text += f"  [default: {shown}]"
        flag = f"--{name.replace('_', '-')}"
        metavar = "SIZE" if name.endswith("_bytes") else name.upper().replace("_", "-")
        command = click.option(flag, name, metavar=metavar, help=text)(command)
    return command


def readable_size(nbytes: int) -> str:
    """`nbytes` as a size that the settings read."""
    for unit, size in SIZE_UNITS:
        if nbytes >= size and nbytes % size == 0:
            return f"{nbytes // size}{unit}"
    return str(nbytes)


@click.command()
@_setting_flags
@click.option("--config", type=click.Path(path_type=Path), metavar="FILE", help="TOML file of settings.")
def serve(config: Path | None, **flags: object) -> None:
    """Run a sidecar until SIGTERM or Ctrl-C.

    Every flag can also be set by a variable (--pool-bytes: MMCACHE_POOL_BYTES) or in the TOML file (pool_bytes).
    Flags win over variables, variables over the file. Sizes read 512MiB, 4GiB or plain bytes.
    """
    settings = load_settings(flags, os.environ, config)
    repeats = configure(settings)
    try:
        from mmcache.server.sidecar import run
    except ModuleNotFoundError as error:
        raise click.ClickException(f"serving needs `pip install 'mmcache[server]'` ({error})") from error
    try:
        run(settings, _announce)
    finally:
        repeats.finish()


def _announce(coordinator: Coordinator) -> None:
    settings, facts = coordinator.settings, coordinator.facts
    ranks = "1 rank" if settings.ranks == 1 else f"{settings.ranks} ranks"
    try:
        click.echo(
            f"mmcache {__version__} ready on {settings.socket}: {facts.model} {facts.dtype} on {settings.device}, "
            f"{ranks} × {readable_size(settings.pool_bytes)}, store {redacted(settings.store)}, "
            f"fingerprint {facts.fingerprint}"
        )
    except OSError as error:  # nobody reads it, or the disk that it goes to is full
        log.warning("ready on %s; the line that says so could not be written: %s", settings.socket, error.strerror)
