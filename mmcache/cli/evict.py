"""`mmcache evict`: what is cached is served no more."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from mmcache import ContentKey, Fingerprint
from mmcache.cli.options import talks_to_sidecar
from mmcache.client import Client, connect
from mmcache.errors import ItemError

_HEX = re.compile(r"[0-9a-fA-F]{32}")


def _fingerprint(_: click.Context, __: click.Parameter, text: str | None) -> Fingerprint | None:
    if text is None:
        return None
    try:
        return Fingerprint.from_hex(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not 32 hex digits, as `mmcache stats` shows them") from None


@click.command()
@click.argument("keys", metavar="[KEY|FILE]...", nargs=-1)
@click.option("--namespace", metavar="NAME", help="All that belongs to it; with a KEY or FILE, the namespace of that.")
@click.option(
    "--fingerprint", metavar="HEX", callback=_fingerprint,
    help="All of this model; with a KEY or FILE, the embedding of this model instead of the one that is served.",
)  # fmt: skip
@click.option("--stale", is_flag=True, help="All of any other model than the one that is served.")
@click.option("--all", "everything", is_flag=True, help="All there is, of every namespace and model.")
@click.option("--dry-run", is_flag=True, help="Change nothing, and say what would be evicted.")
@click.option("--json", "as_json", is_flag=True, help="As JSON, with everything that the sidecar says.")
@talks_to_sidecar
def evict(
    keys: tuple[str, ...], namespace: str | None, fingerprint: Fingerprint | None, stale: bool, everything: bool,
    dry_run: bool, as_json: bool, socket: Path | None, timeout: float,
) -> int:  # fmt: skip
    """Evict embeddings from the pools and from every tier of the store; leases on them stay valid.

    KEY is a content key, 32 hex digits; FILE is a picture, whose key is taken. Of --namespace, --fingerprint and
    --stale several may be given, and then all hold: `--stale --namespace demo` is what is stale in that namespace.
    Where sidecars of several models share a store, what is another's is stale to this one.

    The exit status is 0 if nothing of it is left, whether there was any or not; 1 if some may still be in a tier, or a
    FILE cannot be read; 2 if the command says nothing to evict. What outlives --timeout goes on.
    """
    _check(keys, namespace, fingerprint, stale, everything)
    in_namespace = namespace or "" if keys else ""
    with connect(socket, name="mmcache evict", timeout=timeout, namespace=in_namespace) as client:
        named, num_bad = _named(client, keys)
        if keys and not named:
            return 1
        found = client.evict(
            named, namespace=None if keys else namespace, fingerprint=fingerprint, stale=stale, everything=everything,
            dry_run=dry_run,
        )  # fmt: skip
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        for line in _lines(found):
            click.echo(line)
    for tier, reason in found["failed"].items():
        click.echo(f"mmcache: some may still be in the {tier} tier: {reason}", err=True)
    return 1 if found["failed"] or num_bad else 0


def _check(
    keys: Sequence[str], namespace: str | None, fingerprint: Fingerprint | None, stale: bool, everything: bool
) -> None:
    is_said = bool(keys) or namespace is not None or fingerprint is not None or stale
    if not everything and not is_said:
        raise click.UsageError("Say what to evict: a KEY or FILE, --namespace, --fingerprint, --stale or --all.")
    if everything and is_said:
        raise click.UsageError("--all is everything there is: it takes no KEY, --namespace, --fingerprint or --stale.")
    if stale and (keys or fingerprint is not None):
        raise click.UsageError("--stale is all of other models: it takes no KEY and no --fingerprint.")


def _named(client: Client, texts: Sequence[str]) -> tuple[list[ContentKey], int]:
    """The keys that arguments name, and how many name none; each of those is reported."""
    keys, num_bad = [], 0
    for text in texts:
        try:
            keys.append(ContentKey.from_hex(text) if _HEX.fullmatch(text) else client.key(Path(text)))
        except ItemError as error:
            num_bad += 1
            click.echo(f"mmcache: {text}: neither a key of 32 hex digits nor a file: {error.reason}", err=True)
    return keys, num_bad


def _lines(found: dict[str, Any]) -> Iterator[str]:
    verb = "would evict" if found["dry_run"] else "evicted"
    for name, counts in found["tiers"].items():
        count = f"{counts['entries']:,} embedding{'' if counts['entries'] == 1 else 's'}"
        yield f"{verb} from {name:<6} {count}, {counts['bytes'] / (1 << 20):,.1f} MiB"
