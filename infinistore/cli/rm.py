"""`infinistore rm`: deletes keys."""

import rich_click as click

from infinistore.cli.failures import NegativeAnswer
from infinistore.cli.files import delete_files
from infinistore.cli.options import KEY, Target, client_options, json_option
from infinistore.cli.output import print_json, print_line
from infinistore.cli.silent import demand_all_nodes

__all__ = ["rm"]


@click.command("rm", short_help="Delete keys.")
@click.argument("keys", metavar="[KEY]...", nargs=-1, type=KEY)
@click.option("--prefix", metavar="PREFIX", type=KEY, help="Delete every key that begins with PREFIX.")
@json_option
@client_options
def rm(keys: tuple[str, ...], prefix: str | None, as_json: bool, target: Target) -> None:
    """Delete KEYs, or all keys with a prefix. Exits with 1 if a KEY did not exist.

    A file that `put` stored in blocks is deleted with its blocks. With --prefix, exits
    with 3 if a node of a cluster does not answer, which may have such keys still.
    """
    if bool(keys) == bool(prefix):
        raise click.UsageError(
            "name the keys to delete, or give --prefix PREFIX (to delete all, use `infinistore purge`)"
        )
    from infinistore.blocking import delete_by_prefix

    with target.open() as store:
        if prefix is None:
            deleted, lost = delete_files(store, list(dict.fromkeys(keys))), ""
        else:
            deleted, lost = delete_by_prefix(store, prefix)
        missing = len(set(keys)) - deleted if prefix is None else 0
        if as_json:
            print_json({"deleted": deleted, "missing": missing})
        else:
            print_line(f"deleted {deleted} {'key' if deleted == 1 else 'keys'}")
        demand_all_nodes(lost, "deleted")
    if missing:
        raise NegativeAnswer("" if as_json else f"{missing} of {len(set(keys))} keys were not there")
