"""`infinistore pin` and `infinistore unpin`: which keys eviction passes over."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import rich_click as click

from infinistore.cli.failures import NegativeAnswer
from infinistore.cli.files import with_blocks
from infinistore.cli.options import KEY, Target, client_options, json_option
from infinistore.cli.output import print_json, print_line
from infinistore.cli.silent import demand_all_nodes

if TYPE_CHECKING:
    from infinistore.blocking import BlockingStore

__all__ = ["pin", "unpin"]


def _arguments(which: str) -> Callable[[Any], Any]:
    """Return what gives a command its arguments; `which` keys a prefix names."""

    def add(command: Any) -> Any:
        prefix = click.option(
            "--prefix", metavar="PREFIX", type=KEY, help=f"{which} every key that begins with PREFIX."
        )
        keys = click.argument("keys", metavar="[KEY]...", nargs=-1, type=KEY)
        return keys(prefix(json_option(client_options(command))))

    return add


@click.command("pin", short_help="Keep keys from being evicted.")
@click.option(
    "--ttl", type=click.FloatRange(0, min_open=True), metavar="SECONDS",
    help="Let the pins end after so many seconds. A key that is pinned for longer stays so.",
)  # fmt: skip
@_arguments("Pin")
def pin(keys: tuple[str, ...], prefix: str | None, ttl: float | None, as_json: bool, target: Target) -> None:
    """Keep KEYs, or all keys with a prefix, from being evicted, until `unpin`, or for
    a time.

    Exits with 1 if a KEY could not be pinned because it is not in memory, with --prefix
    with 3 if a node of a cluster does not answer, which may have such keys. A file that
    `put` stored in blocks is pinned with its blocks. All pinned keys together may take
    --max-protected-ratio of the server's pool. A server that restarts forgets all pins.
    """
    _carry_out("pinned", lambda store: partial(store.pin, ttl_s=ttl), keys, prefix, as_json=as_json, target=target)


@click.command("unpin", short_help="Let pinned keys be evicted again.")
@_arguments("Unpin")
def unpin(keys: tuple[str, ...], prefix: str | None, as_json: bool, target: Target) -> None:
    """Let KEYs, or all keys with a prefix, be evicted again.

    Exits with 1 if a KEY was not pinned, with --prefix with 3 if a node of a cluster
    does not answer, which may have such keys.
    """
    _carry_out("unpinned", lambda store: store.unpin, keys, prefix, as_json=as_json, target=target)


def _carry_out(
    done: str,
    call_of: "Callable[[BlockingStore], Callable[[Iterable[str]], int]]",
    keys: tuple[str, ...],
    prefix: str | None,
    *,
    as_json: bool,
    target: Target,
) -> None:
    if bool(keys) == bool(prefix):
        raise click.UsageError("name the keys, or give --prefix PREFIX")
    from infinistore.blocking import do_by_prefix

    asked, lost = 0, ""
    with target.open() as store:
        call = call_of(store)
        if prefix is None:
            names = with_blocks(store, list(dict.fromkeys(keys)))
            count, asked = call(names), len(names)
        else:
            count, lost = do_by_prefix(store, prefix, call)
        missing = asked - count if prefix is None else 0
        if as_json:
            print_json({done: count, "missing": missing})
        else:
            print_line(f"{done} {count} {'key' if count == 1 else 'keys'}")
        demand_all_nodes(lost, done)
    if missing:
        why = "are not in memory" if done == "pinned" else "were not pinned"
        raise NegativeAnswer("" if as_json else f"{missing} of {asked} keys {why}")
