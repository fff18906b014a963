"""`infinistore stat`: statistics of the store."""

from collections.abc import Iterator
from typing import Any

import attrs
import rich_click as click

from infinistore.cli.options import Target, client_options, json_option
from infinistore.cli.output import print_json, print_table
from infinistore.sizes import describe_size

__all__ = ["stat"]


@click.command("stat", short_help="Show statistics.")
@click.option(
    "--details", is_flag=True,
    help="With --json: also operations, connections, arenas, and keys by prefix.",
)  # fmt: skip
@json_option
@client_options
def stat(details: bool, as_json: bool, target: Target) -> None:
    """Show the store's statistics, and the transport of this client.

    --json uses the names of the table; sizes are in bytes, and a suffix of the name is
    the unit of a time. Disks are there only if the store has some, by their number.
    """
    if details and not as_json:
        raise click.UsageError("--details are lists: add --json, or see `infinistore monitor`")
    with target.open() as store:
        statistics = attrs.asdict(store.stats(details))
    if not details:
        del statistics["details"]
    if statistics["disk"] is None:
        del statistics["disk"]
    if as_json:
        print_json(statistics)
    else:
        print_table(("name", "value"), [(name, _shown(name, value)) for name, value in _leaves(statistics)])


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            yield from _leaves({str(index): one for index, one in enumerate(value)}, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _shown(name: str, value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int) and name.endswith("_bytes"):
        return describe_size(value)
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)
