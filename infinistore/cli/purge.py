"""`infinistore purge`: deletes every key."""

import sys

import rich_click as click

from infinistore.cli.options import Target, client_options, json_option
from infinistore.cli.output import print_json, print_line

__all__ = ["command"]


@click.command("purge", short_help="Delete every key.")
@click.option("--yes", is_flag=True, help="Do not ask. Required without a terminal.")
@json_option
@client_options
def command(yes: bool, as_json: bool, target: Target) -> None:
    """Delete every key in the store."""
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("this deletes every key; add --yes to say that you mean it")
        click.confirm(f"Delete every key of {target.url}?", abort=True, err=True)
    with target.open() as store:
        deleted = store.purge()
    if as_json:
        print_json({"deleted": deleted})
    else:
        print_line(f"deleted {deleted} {'key' if deleted == 1 else 'keys'}")
