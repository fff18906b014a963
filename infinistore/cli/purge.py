"""`infinistore purge`: deletes every key."""

import rich_click as click

from infinistore.cli.options import Target, client_options, json_option
from infinistore.cli.output import demand_yes, print_json, print_line

__all__ = ["purge"]


@click.command("purge", short_help="Delete every key.")
@click.option("--yes", is_flag=True, help="Do not ask. Required without a terminal.")
@json_option
@client_options
def purge(yes: bool, as_json: bool, target: Target) -> None:
    """Delete every key in the store."""
    demand_yes(f"Delete every key of {target.url}?", yes=yes, warning="this deletes every key")
    with target.open() as store:
        deleted = store.purge()
    if as_json:
        print_json({"deleted": deleted})
    else:
        print_line(f"deleted {deleted} {'key' if deleted == 1 else 'keys'}")
