"""`infinistore bench`: how fast this store is on this machine, next to the same bytes moved without a store."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final

import attrs
import rich_click as click

from infinistore.cli.options import SIZE, Target, client_options, json_option
from infinistore.cli.output import note, print_json, print_line, print_table, progress_bar
from infinistore.sizes import describe_size

__all__ = ["command"]

_DEFAULT_SIZES: Final = "4KiB,64KiB,1MiB"


if TYPE_CHECKING:
    from infinistore.blocking import BlockingStore
    from infinistore.cli.measure import Plan

    _TextToSizes = click.ParamType[tuple[int, ...]]
else:
    _TextToSizes = click.ParamType


class _Sizes(_TextToSizes):
    """A list of sizes with commas."""

    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        return tuple(SIZE.convert(part.strip(), param, ctx) for part in str(value).split(","))


@click.command("bench", short_help="Measure the speed, next to raw sockets or a copy of memory.")
@click.option("--embedded", is_flag=True, help="Measure a store in this process. No server is needed.")
@click.option(
    "--sizes", type=_Sizes(), metavar="SIZE,...", default=_DEFAULT_SIZES, show_default=True, help="Sizes of a block."
)
@click.option(
    "--batch", type=click.IntRange(1, 8192), metavar="N", default=64, show_default=True, help="Blocks in one call."
)
@click.option(
    "--clients", type=click.IntRange(1, 256), metavar="N", default=1, show_default=True,
    help="Connections that work at the same time, each in a thread of this process.",
)  # fmt: skip
@click.option(
    "--path", type=click.Choice(["auto", "tcp", "unix", "shm", "rdma"]), default="auto", show_default=True,
    help="Which way the bytes go to the server of --url.",
)  # fmt: skip
@click.option(
    "--seconds", type=click.FloatRange(min=0, min_open=True), metavar="S", default=1.0, show_default=True,
    help="Time for each figure; there are four for each size.",
)  # fmt: skip
@json_option
@client_options
def command(
    *,
    embedded: bool,
    sizes: tuple[int, ...],
    batch: int,
    clients: int,
    path: str,
    seconds: float,
    as_json: bool,
    target: Target,
) -> None:
    """Put and get batches of blocks for a while, and print how fast that was.

    The ratio compares with the same bytes moved in the same run: over blocking sockets to another process if the store
    is reached over a socket, by a copy of memory if it is not. The keys written are deleted at the end; they may push
    others out of a store that is nearly full.
    """
    from infinistore.cli.measure import Plan, measure

    plan = Plan(sizes, batch, clients, seconds)
    if embedded and path != "auto":
        raise click.UsageError("--path is about a server; leave it out with --embedded")
    with _opener(target, plan, embedded=embedded, path=path) as open_store, progress_bar(plan.steps) as report:
        figures, transport, reason = measure(plan, open_store, report)
    if as_json:
        print_json({"transport": transport, "reason": reason, "figures": [attrs.asdict(figure) for figure in figures]})
        return
    print_line(f"transport: {transport} ({reason})" if reason else f"transport: {transport}")
    compared = figures[0].compared_with
    numbers = ("GB/s", "batch p50 us", "batch p99 us", f"{compared} GB/s", "ratio")
    print_table(
        ("call", "block", "batch", "clients", *numbers),
        [
            (
                figure.operation,
                describe_size(figure.size_bytes),
                str(figure.batch),
                str(figure.clients),
                f"{figure.bytes_per_s / 1e9:.2f}",
                f"{figure.batch_p50_us:.0f}",
                f"{figure.batch_p99_us:.0f}",
                f"{figure.compared_bytes_per_s / 1e9:.2f}",
                f"{figure.ratio:.2f}",
            )
            for figure in figures
        ],
        numbers=("block", "batch", "clients", *numbers),
    )
    if compared == "raw sockets" and not _is_local(target.url):
        note("raw sockets were measured on this machine's loopback, not on the network to the server")


@contextmanager
def _opener(
    target: Target, plan: "Plan", *, embedded: bool, path: str
) -> Iterator[Callable[[], AbstractContextManager["BlockingStore"]]]:
    """What opens a client's store. The embedded clients share one store: they are threads of one process."""
    if not embedded:
        yield target.over(path).open
        return
    from contextlib import nullcontext

    from infinistore import blocking

    # Twice what is written, so that a put never waits for an eviction; and some, for what alignment takes.
    pool_bytes = 2 * plan.clients * plan.batch * (max(plan.sizes_bytes) + 65536) + (64 << 20)
    with blocking.open_store(pool_bytes=pool_bytes) as store:
        yield lambda: nullcontext(store)


def _is_local(url: str) -> bool:
    from urllib.parse import urlsplit

    from infinistore.config import is_loopback

    return is_loopback(urlsplit(url).hostname or "localhost")
