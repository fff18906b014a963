"""`infinistore demo`: a KV cache goes from prefill through a server to decode."""

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import rich_click as click

from infinistore.cli.failures import NegativeAnswer, innermost
from infinistore.cli.options import SIZE_IN_GB, json_option
from infinistore.cli.output import console, note, print_json
from infinistore.demo.prompts import (
    DEFAULT_POOL_BYTES,
    GROUP_CHUNKS,
    SMALLER_POOL_BYTES,
    DemoError,
    DemoSettings,
    KVLayout,
    read_text,
)
from infinistore.host import check_server_runs_here
from infinistore.sizes import format_size

if TYPE_CHECKING:
    from infinistore.demo.workers import Found

_USUAL: Final = DemoSettings()


@click.command()
@click.option(
    "--input", "input_file", metavar="FILE", type=click.Path(path_type=Path),
    help="The text to use. Default: the included text about KV caches.",
)  # fmt: skip
@click.option("--url", metavar="URL", help="Use this running server instead of starting one.")
@click.option(
    "--pool-size", "pool_bytes", metavar="SIZE", type=SIZE_IN_GB,
    help=f"Pool of the server to start, in GB or with a unit. Default: {format_size(DEFAULT_POOL_BYTES)}, with a disk "
    f"or with nodes, for each, {format_size(SMALLER_POOL_BYTES)}.",
)  # fmt: skip
@click.option(
    "--disk", is_flag=True,
    help="Restart the server with a disk, and load the first prompt from there. It takes up to three times the pool in "
    "TMPDIR, and is removed at the end.",
)  # fmt: skip
@click.option(
    "--nodes", metavar="N", type=click.IntRange(2, 16),
    help="Start a cluster of N servers, kill one, and let another one join. An etcd lists them, if it is installed, or "
    "a file.",
)  # fmt: skip
@click.option(
    "--chunk-tokens", metavar="N", type=click.IntRange(1, 4096), default=_USUAL.layout.chunk_tokens, show_default=True,
    help="Tokens per chunk; a block is one layer of one chunk.",
)  # fmt: skip
@click.option(
    "--layers", metavar="N", type=click.IntRange(1, 1024), default=_USUAL.layout.layers, show_default=True,
    help="Layers of the model; Qwen2.5-7B has 28.",
)  # fmt: skip
@click.option(
    "--prefill-tokens-per-s", metavar="N", type=click.FloatRange(1, 1e9), default=_USUAL.prefill_tokens_per_s,
    show_default=True, help="Speed of the simulated model. No model runs.",
)  # fmt: skip
@json_option
def command(
    *,
    url: str | None,
    pool_bytes: int | None,
    disk: bool,
    nodes: int | None,
    chunk_tokens: int,
    layers: int,
    as_json: bool,
    **others: Any,
) -> None:
    """Demonstrate on this machine what the store is for.

    Starts a server, and processes for prefill and decode, which talk over TCP. Prefill
    stores the KV cache of a text layer by layer (simulated, in the layout of
    Qwen2.5-7B). Decode finds the longest prefix, loads it, and compares every byte. A
    second prompt with the same beginning shows which blocks are reused. Exit code 0
    means that every byte was correct.

    Needs about 1.2 GB of memory, or less with a smaller --pool-size.
    """  # fmt: skip
    if url is not None and (pool_bytes is not None or disk):
        flag = "--disk" if pool_bytes is None else "--pool-size"
        raise click.UsageError(f"{flag} is for the server that the demo starts, not for the one at --url")
    if nodes is not None and (url is not None or disk):
        raise click.UsageError(f"--nodes starts a cluster of its own; leave {'--disk' if url is None else '--url'} out")
    if url is None:
        check_server_runs_here()
    if pool_bytes is None:
        pool_bytes = SMALLER_POOL_BYTES if disk or nodes else DEFAULT_POOL_BYTES
    layout = KVLayout(layers=layers, chunk_tokens=chunk_tokens, group_chunks=GROUP_CHUNKS if nodes else 0)
    settings = DemoSettings(url=url, pool_bytes=pool_bytes, disk=disk, nodes=nodes or 0, layout=layout, **others)
    text = None
    try:
        text = read_text(settings)
        found = _run(settings, *text, quiet=as_json)
    except* DemoError as group:
        error = innermost(group)
        if as_json:
            print_json({"ok": False, "error": str(error)})
        if text is None:
            raise click.UsageError(str(error)) from None
        raise NegativeAnswer(f"the demo failed: {error}") from None
    if as_json:
        print_json(found)


def _run(settings: DemoSettings, source: str, tokens: list[int], *, quiet: bool) -> "Found":
    """Run the demo and print its table. A signal ends all its processes, then this
    one.
    """
    import trio

    from infinistore.demo.display import Display
    from infinistore.demo.run import run_demo

    screen = console()
    screen.quiet = quiet
    display = Display(screen)
    outcome: list[Found | signal.Signals] = []

    async def run() -> None:
        # Until the end, so that a second signal does not keep the first from removing
        # what was made.
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
            async with trio.open_nursery() as nursery:

                async def tell() -> None:
                    with display.bars:
                        outcome.append(await run_demo(settings, source, tokens, display))
                    nursery.cancel_scope.cancel()

                nursery.start_soon(tell)
                async for number in signals:
                    outcome.append(signal.Signals(number))
                    nursery.cancel_scope.cancel()

    trio.run(run)
    found = outcome[0]
    if isinstance(found, signal.Signals):
        note(f"stopped by {found.name}; the server and the workers have ended")
        raise SystemExit(128 + found)
    display.conclude(found)
    return found
