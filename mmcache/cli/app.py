"""The group of all commands, and how errors become messages and exit statuses."""

from __future__ import annotations

import os
import sys

import click

from mmcache._version import __version__
from mmcache.cli import INTERRUPTED
from mmcache.cli.encode import encode
from mmcache.cli.evict import evict
from mmcache.cli.leases import leases
from mmcache.cli.reload import reload
from mmcache.cli.serve import serve
from mmcache.cli.stats import stats
from mmcache.errors import ConfigError, MMCacheError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="mmcache", message="%(prog)s %(version)s")
def cli() -> None:
    """A caching multimodal feature store: images in, cached embeddings out.

    Start a sidecar with `mmcache serve`; clients find it by its socket. See `mmcache COMMAND --help`.
    """


cli.add_command(serve)
cli.add_command(encode)
cli.add_command(stats)
cli.add_command(leases)
cli.add_command(reload)
cli.add_command(evict)


def run(args: list[str] | None = None) -> int:
    """Run a command. Returns the exit status."""
    try:
        status = cli.main(args=args, prog_name="mmcache", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return INTERRUPTED
    except ConfigError as error:
        click.echo(f"mmcache: {error}", err=True)
        return 2
    except MMCacheError as error:
        click.echo(f"mmcache: {error}", err=True)
        return 1
    except BrokenPipeError:
        # The reader of our output left (a pager, `head`); keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status if isinstance(status, int) else 0
