"""`vllm serve` over HTTP, asked by `vllm bench serve`: cold, and warm after vLLM was
started again.

    make serve-bench
    make serve-bench SERVE_BENCH_ARGS="--tokens 768 --ways connector cluster disk"
    python bench/serve_bench.py --help

All prompts are random, are asked at once, and get one token each; a few more come one
by one, and get 16 tokens. Cold is a vLLM that finds nothing in its store; warm is
another vLLM, asked the same after the first has ended. The store runs on. Each vLLM has
answered one other prompt before. Both must answer the same. Hits are the share of the
prompts' tokens that vLLM got from the store, by its own metrics.

The ways:

    connector   vLLM with the connector, and one server
    own-cache   the same vLLM asked again, which has all in its own cache; and one
                without, which has the store alone
    lmcache     vLLM with LMCache, configured as the original InfiniStore's page says
    lmcache-mp  vLLM with LMCache's server (its multi-process mode), which has the store
                as its second level, and is started again with vLLM
    local-disk  vLLM with LMCache's own disk (local_disk), and the same vLLM asked again
    cluster     as connector, with a cluster of three servers
    disk        as connector, and what is warm is on the server's disk only
    windows     as connector, with a model like Gemma 3: five of six layers have a
                sliding window of 512 tokens, of which only the last is stored and read
    pair        one vLLM that prefills and one that decodes, behind `infinistore route`
    routed      conversations of ten turns over two vLLMs and a store, behind
                `infinistore route`: soonest and round robin, in turns; then 300 streams
                at once, twice, and a vLLM is killed by SIGKILL
    slow-link   a link of 2 MB/s to the store, and a vLLM that chooses whether it loads
                ("load": "faster"), that always loads, and that has no store; all ways
                run in a network namespace then, where tc limits loopback
    kill        the store dies by SIGKILL while requests wait, and starts again empty:
                no request fails, and the same vLLM stores and finds blocks again
    overhead    nothing to reuse: rounds with the connector and without, in turns

Prompts of 768 tokens suit two cores, where each way takes a few minutes. A signal
(Ctrl-C) ends everything that was started; with `--resume FILE`, what has ended by then
is kept, and the next run measures the rest. With `--check`, the exit status is 1, too, if
a figure is worse than it is wanted to be for prompts of 2,048 tokens.
"""

import argparse
import json
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import cattrs
import trio
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from machine import this_machine
from programs import ProgramError
from recorded import Record, RecordError
from serve_wanted import WANTED, misses
from serve_ways import OVERHEAD_AT_LEAST, WAYS, Outcome
from served import BLOCK_TOKENS, Bench
from slow_link import enter_own_network

COLUMNS = ("way", "", "TTFT mean, s", "median", "p99", "cold / warm", "prompts/s", "hits", "same answers")


def cells_of(outcome: Outcome) -> list[list[str]]:
    """Return the lines of a way's table."""
    lines = []
    for row in outcome.rows:
        made = row.round
        ratio = outcome.figures.get("cold / warm") if row.what == "warm" else None
        times = [f"{seconds:.3f}" for seconds in (made.ttft_mean_s, made.ttft_median_s, made.ttft_p99_s)]
        more = ["" if ratio is None else f"{ratio:.1f}", f"{made.prompts_a_s:.2f}", f"{made.hits:.0%}"]
        lines.append([row.way, row.what, *times, *more, "yes" if row.same else "NO"])
    return lines


def table_of(outcomes: Sequence[Outcome], prompts: int, tokens: int) -> Table:
    """Return what people read."""
    table = Table(title=f"vllm serve, {prompts} prompts of {tokens} tokens at once")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in {"way", ""} else "right")
    for outcome in outcomes:
        for cells in cells_of(outcome):
            table.add_row(*cells)
        table.add_section()
    return table


def as_markdown(outcomes: Sequence[Outcome]) -> str:
    """Return the same table, for a page."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(cells for outcome in outcomes for cells in cells_of(outcome))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def as_json(outcomes: dict[str, Outcome]) -> str:
    """Return what programs read."""
    made: dict[str, Any] = {}
    for way, outcome in outcomes.items():
        rounds = {
            row.what: {
                **{name: value for name, value in row.round._asdict().items() if name != "answers"},
                "hits": row.round.hits,
                "same": row.same,
            }
            for row in outcome.rows
        }
        made[way] = {**rounds, **outcome.figures}
    return json.dumps(made, indent=2)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ["connector", "lmcache"]
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=default, metavar="WAY", help=f"default: {' '.join(default)}"
    )
    parser.add_argument("--prompts", type=int, default=50, help="prompts at once; default: 50")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of each prompt; default: 2048")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model; default: 8")
    parser.add_argument("--hidden", type=int, default=768, help="its hidden size, a multiple of 64; default: 768")
    parser.add_argument(
        "--vllm",
        default="",
        metavar="FLAGS",
        help="further flags of each vllm serve, such as --vllm='--data-parallel-size 2'",
    )
    parser.add_argument(
        "--overhead-minutes",
        type=float,
        default=4,
        metavar="MINUTES",
        help=f"overhead begins no round after this, but has at least {OVERHEAD_AT_LEAST} of each; default: 4",
    )
    parser.add_argument("--limit", type=float, default=60, metavar="MINUTES", help="give up after this; default: 60")
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FILE",
        help="keep what each way measured there, and measure what it lacks",
    )
    parser.add_argument("--check", action="store_true", help="fail where a figure is worse than it is wanted to be")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON instead of a table")
    form.add_argument("--markdown", action="store_true", help="print the table as Markdown, for a page")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the model and all logs here")
    given = parser.parse_args(arguments)
    if not 2 * BLOCK_TOKENS <= given.tokens <= 7900:
        parser.error(f"--tokens: from {2 * BLOCK_TOKENS} to 7900, not {given.tokens}")
    if not 1 <= given.prompts <= 1000:
        parser.error(f"--prompts: from 1 to 1000, not {given.prompts}")
    if given.hidden < 64 or given.hidden % 64 or given.layers < 1:
        parser.error("--hidden: a multiple of 64; --layers: at least 1")
    try:
        shlex.split(given.vllm)
    except ValueError as error:
        parser.error(f"--vllm: {error}")
    if given.check and not WANTED.keys() & given.ways:
        parser.error(f"--check: nothing is wanted of these ways, but of {', '.join(WANTED)}")
    if given.limit <= 0 or given.overhead_minutes <= 0:
        parser.error("--limit and --overhead-minutes: more than 0 minutes")
    return given


def record_of(given: argparse.Namespace) -> Record:
    """Return what has been measured with these settings. RecordError if it is none."""
    settings = {name: getattr(given, name) for name in ("prompts", "tokens", "layers", "hidden", "vllm")}
    return Record(given.resume, settings, this_machine(), given.ways, resume=True)


def keep(record: Record, way: str, outcome: Outcome) -> None:
    """Keep what a way has measured, unless it has to be measured again."""
    if not outcome.failed and all(row.same for row in outcome.rows):
        record.add(way, {"outcome": cattrs.unstructure(outcome)})


def kept_in(record: Record) -> dict[str, Outcome]:
    """Return what ways have measured before."""
    return {row["row"]: cattrs.structure(row["outcome"], Outcome) for row in record.rows}


async def run(
    given: argparse.Namespace, folder: Path, console: Console, record: Record, outcomes: dict[str, Outcome]
) -> int:
    """Measure all ways, and add what comes of each; return the status to end with."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%"), TimeElapsedColumn())
    status, kept = 0, kept_in(record)
    with Progress(*columns, console=console, transient=True) as progress, trio.move_on_after(given.limit * 60) as limit:
        task: TaskID = progress.add_task("", total=1 + sum(WAYS[way][1] for way in given.ways))

        def tell(text: str) -> None:
            progress.update(task, description=text)
            if not console.is_terminal:
                console.print(text, markup=False)

        async with trio.open_nursery() as outer:
            work = trio.CancelScope()

            async def end_at_a_signal(*, task_status: trio.TaskStatus[None]) -> None:
                nonlocal status
                with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                    task_status.started()
                    async for number in signals:  # also while things are stopped
                        if not status:
                            status = 128 + number
                            console.print("stopping what was started")
                            work.cancel()

            await outer.start(end_at_a_signal)
            with work:
                async with trio.open_nursery() as nursery:
                    bench = Bench(given, folder, nursery, tell, lambda share: progress.advance(task, share))
                    await bench.make_model(given.layers, given.hidden)
                    bench.advance(1)
                    for way in given.ways:
                        if way in kept:
                            tell(f"{way}: as it was measured before")
                            outcomes[way] = kept[way]
                            bench.advance(WAYS[way][1])
                        else:
                            outcomes[way] = await WAYS[way][0](bench)
                            keep(record, way, outcomes[way])
                        for line in lines_of(outcomes[way]):
                            console.print(line, markup=False)
            outer.cancel_scope.cancel()
    if limit.cancelled_caught:
        console.print(f"gave up after {given.limit:g} minutes: --limit allows more, --prompts and --tokens take less")
        return 1
    return status


def lines_of(outcome: Outcome) -> list[str]:
    """Return what is told when a way has ended."""
    rounds = [
        f"{row.way}, {row.what}: TTFT {row.round.ttft_mean_s:.3f} s, hits {row.round.hits:.0%}" for row in outcome.rows
    ]
    return [*rounds, *([outcome.text] if outcome.text else [])]


def main() -> int:
    """Run it; 1 if a request failed, an answer differed, nothing was found, or a figure
    that is checked is worse than wanted."""
    given = parse()
    console = Console(stderr=True)
    try:
        record = record_of(given)
        if "slow-link" in given.ways:
            enter_own_network()
    except (ProgramError, RecordError) as refused:
        console.print(f"gave up: {refused}", markup=False)
        return 1
    with ExitStack() as stack:
        folder = given.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="serve-bench-")))
        folder.mkdir(parents=True, exist_ok=True)
        error: BaseException | None = None
        status, made = 1, dict[str, Outcome]()
        for number in (signal.SIGINT, signal.SIGTERM):  # one that comes at the very end ends nothing early
            signal.signal(number, lambda *_: None)
        try:
            status = trio.run(run, given, folder, console, record, made)
        except* ProgramError as group:
            error = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if error is not None:
            console.print(f"gave up: {error}", markup=False)
    # Also where a later way gave up: what has been measured took minutes.
    if given.json and (made or not status):
        print(as_json(made))
    elif made:
        print_all(made, given)
    missed = misses({way: outcome.figures for way, outcome in made.items()}) if given.check else []
    for line in missed:
        console.print(line, markup=False, soft_wrap=True)
    failed = any(outcome.failed or not all(row.same for row in outcome.rows) for outcome in made.values())
    return status or int(failed or bool(missed))


def print_all(outcomes: dict[str, Outcome], given: argparse.Namespace) -> None:
    """Print the table, and the sentences below it."""
    console = Console(width=None if sys.stdout.isatty() else 120)  # in a file, columns are not cut
    with_rows = [outcome for outcome in outcomes.values() if outcome.rows]
    if with_rows and given.markdown:
        print(as_markdown(with_rows))
    elif with_rows:
        console.print(table_of(with_rows, given.prompts, given.tokens))
    for outcome in outcomes.values():
        if outcome.text:
            console.print(outcome.text, markup=False)


if __name__ == "__main__":
    sys.exit(main())
