"""`infinistore bench`: measures a store, next to the same bytes without a store."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final

import attrs
import rich_click as click

from infinistore.cli.options import SIZE, Target, client_options, json_option
from infinistore.cli.output import note, print_json, print_line, print_table, progress_bar
from infinistore.sizes import describe_size

_DEFAULT_SIZES: Final = "4KiB,64KiB,1MiB"


if TYPE_CHECKING:
    from infinistore.blocking import BlockingStore
    from infinistore.cli.measure import Plan

    _TextToSizes = click.ParamType[tuple[int, ...]]
else:
    _TextToSizes = click.ParamType


class _Sizes(_TextToSizes):
    """A comma-separated list of sizes."""

    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        return tuple(SIZE.convert(part.strip(), param, ctx) for part in str(value).split(","))


@click.command("bench", short_help="Measure the speed, compared with raw sockets or a memory copy.")
@click.option("--embedded", is_flag=True, help="Measure a store in this process, without a server.")
@click.option(
    "--sizes", type=_Sizes(), metavar="SIZE,...", default=_DEFAULT_SIZES, show_default=True, help="Block sizes."
)
@click.option(
    "--batch", type=click.IntRange(1, 8192), metavar="N", default=64, show_default=True, help="Blocks per call."
)
@click.option(
    "--clients", type=click.IntRange(1, 256), metavar="N", default=1, show_default=True,
    help="Concurrent connections, each in a thread of this process.",
)  # fmt: skip
@click.option(
    "--path", type=click.Choice(["auto", "tcp", "unix", "shm", "rdma"]), default="auto", show_default=True,
    help="Transport to the server of --url.",
)  # fmt: skip
@click.option(
    "--seconds", type=click.FloatRange(min=0, min_open=True), metavar="S", default=1.0, show_default=True,
    help="Time per figure; there are four per size.",
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
    """Put and get batches of blocks, and print the speed.

    The ratio compares with the same bytes moved in the same run: over blocking sockets
    to another process for a store over a socket, otherwise by a memory copy. The keys
    are deleted at the end. In a store that is nearly full, they may evict others.
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
    """What opens a client's store. Embedded clients are threads that share one."""
    if not embedded:
        yield target.over(path).open
        return
    from contextlib import nullcontext

    from infinistore import blocking

    # Twice the written bytes, so that a put never waits for eviction, plus alignment.
    pool_bytes = 2 * plan.clients * plan.batch * (max(plan.sizes_bytes) + 65536) + (64 << 20)
    with blocking.open_store(pool_bytes=pool_bytes) as store:
        yield lambda: nullcontext(store)


def _is_local(url: str) -> bool:
    from urllib.parse import urlsplit

    from infinistore.addresses import is_loopback

    return is_loopback(urlsplit(url).hostname or "localhost")
