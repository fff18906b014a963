"""`infinistore demo`: a text's KV cache goes from prefill through a server to decode, and every byte is checked."""

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import rich_click as click

from infinistore.cli.failures import NegativeAnswer
from infinistore.cli.options import json_option
from infinistore.cli.output import note, print_json
from infinistore.demo.layout import DEFAULT_CHUNK_TOKENS, KVLayout
from infinistore.demo.settings import DEFAULT_POOL_BYTES, DEFAULT_PREFILL_TOKENS_PER_S, DemoSettings
from infinistore.sizes import GIB, format_size, parse_size

if TYPE_CHECKING:
    from rich.console import Console

    from infinistore.demo.result import DemoResult
__all__ = ["command"]

_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _PoolSize(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """A size as `--prealloc-size` of the server takes it: in GB or with a unit."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_size(value, GIB)
        except ValueError as error:
            self.fail(f"{value} {error}", param, ctx)


@click.command()
@click.option(
    "--input",
    "input_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The text to use. Default: one about KV caches that comes with InfiniStore.",
)
@click.option("--url", metavar="URL", help="Use this server, which runs already, instead of starting one.")
@click.option(
    "--pool-size",
    "pool_bytes",
    metavar="SIZE",
    type=_PoolSize(),
    help=f"Memory of the server that is started, in GB or with a unit. Default: {format_size(DEFAULT_POOL_BYTES)}.",
)
@click.option(
    "--chunk-tokens",
    metavar="N",
    type=click.IntRange(1, 4096),
    default=DEFAULT_CHUNK_TOKENS,
    show_default=True,
    help="Tokens in a chunk; a block is one layer of one chunk.",
)
@click.option(
    "--layers",
    metavar="N",
    type=click.IntRange(1, 1024),
    default=KVLayout().layers,
    show_default=True,
    help="Layers of the model; Qwen2.5-7B has 28.",
)
@click.option(
    "--prefill-tokens-per-s",
    metavar="N",
    type=click.FloatRange(1, 1e9),
    default=DEFAULT_PREFILL_TOKENS_PER_S,
    show_default=True,
    help="How fast the simulated model computes. No model runs.",
)
@json_option
def command(
    *,
    input_file: Path | None,
    url: str | None,
    pool_bytes: int | None,
    chunk_tokens: int,
    layers: int,
    prefill_tokens_per_s: float,
    as_json: bool,
) -> None:
    """Show on this machine what the store is for.

    Starts a server, a prefill process and a decode process, which talk over TCP. Prefill cuts a text into tokens and
    chunks, computes their KV cache (simulated, in the layout of Qwen2.5-7B), and stores it layer by layer. Decode finds
    the longest prefix, loads it, and compares every byte. A second prompt that begins like the first shows what can be
    used again. Exit code 0 means that every byte was right.

    Needs about 1.2 GB of memory; less with a smaller --pool-size.
    """  # fmt: skip
    from infinistore.demo.failure import DemoError

    if url is not None and pool_bytes is not None:
        raise click.UsageError(
            "--pool-size is for the server that the demo starts; the one at --url has its pool already"
        )
    settings = DemoSettings(
        input_file=input_file,
        url=url,
        pool_bytes=DEFAULT_POOL_BYTES if pool_bytes is None else pool_bytes,
        layout=KVLayout(layers=layers, chunk_tokens=chunk_tokens),
        prefill_tokens_per_s=prefill_tokens_per_s,
    )
    try:
        result = _run(settings, _console(quiet=as_json))
    except DemoError as error:
        if as_json:
            print_json({"ok": False, "error": str(error)})
        raise NegativeAnswer(f"the demo failed: {error}") from None
    if as_json:
        print_json(result.as_json())


def _console(*, quiet: bool) -> "Console":
    from infinistore.cli.output import console

    made = console()
    made.quiet = quiet
    return made


def _run(settings: DemoSettings, console: "Console") -> "DemoResult":
    """Run the demo and print its table; a signal to stop ends all its processes first, then this one."""
    import trio

    from infinistore.demo.display import Display
    from infinistore.demo.failure import expected_error
    from infinistore.demo.run import run_demo

    async def run() -> "DemoResult | signal.Signals":
        stopped_by: list[signal.Signals] = []

        async def stop_on_signal(*, task_status: trio.TaskStatus[None]) -> None:
            with trio.open_signal_receiver(*_STOP_SIGNALS) as signals:
                task_status.started()
                async for number in signals:
                    stopped_by.append(signal.Signals(number))
                    nursery.cancel_scope.cancel()

        result: DemoResult | None = None
        async with trio.open_nursery() as nursery:
            await nursery.start(stop_on_signal)
            with Display(console) as display:
                result = await run_demo(settings, display)
            display.table(result)
            nursery.cancel_scope.cancel()
        return stopped_by[0] if result is None else result

    try:
        outcome = trio.run(run)
    except BaseExceptionGroup as group:
        raise expected_error(group) from None
    if isinstance(outcome, signal.Signals):
        note(f"stopped by {outcome.name}; the server and the workers have ended")
        raise SystemExit(128 + outcome)
    return outcome
