"""`infinistore evict`: evicts now."""

import rich_click as click

from infinistore.cli.options import Target, client_options, json_option
from infinistore.cli.output import print_json, print_line

__all__ = ["evict"]

_FRACTION = click.FloatRange(0, 1)


@click.command("evict", short_help="Evict blocks now.")
@click.option(
    "--min", "low", metavar="FRACTION", type=_FRACTION, default=0.6, show_default=True,
    help="Stop when this fraction of the pool is in use.",
)  # fmt: skip
@click.option(
    "--max", "high", metavar="FRACTION", type=_FRACTION, default=0.8, show_default=True,
    help="Do nothing unless more than this fraction is in use.",
)  # fmt: skip
@json_option
@client_options
def evict(low: float, high: float, as_json: bool, target: Target) -> None:
    """Evict the least recently used blocks down to --min, if the pool exceeds --max."""
    if low > high:
        raise click.UsageError(f"--min {low:g} must not be above --max {high:g}")
    with target.open() as store:
        evicted = store.evict(low, high)
    if as_json:
        print_json({"evicted": evicted})
    else:
        print_line(f"evicted {evicted} {'block' if evicted == 1 else 'blocks'}")
