"""`infinistore exists`: reports which keys exist."""

import rich_click as click

from infinistore.cli.failures import NegativeAnswer
from infinistore.cli.options import KEY, Target, client_options, json_option
from infinistore.cli.output import print_json, print_line, visible

__all__ = ["exists"]


@click.command("exists", short_help="Report which keys exist.")
@click.argument("keys", metavar="KEY...", nargs=-1, required=True, type=KEY)
@json_option
@client_options
def exists(keys: tuple[str, ...], as_json: bool, target: Target) -> None:
    """Report which KEYs exist. Exits with 1 if one is missing."""
    with target.open() as store:
        found = store.exists_many(list(keys))
    if as_json:
        print_json({"keys": dict(zip(keys, found, strict=True))})
    else:
        for key, present in zip(keys, found, strict=True):
            print_line(f"{'present' if present else 'missing'}\t{visible(key)}")
    if not all(found):
        raise NegativeAnswer
