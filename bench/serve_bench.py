"""`vllm serve` over HTTP, asked by `vllm bench serve`: cold, and warm after vLLM was
started again.

    make serve-bench
    make serve-bench SERVE_BENCH_ARGS="--tokens 768 --ways connector cluster disk"
    python bench/serve_bench.py --help

All prompts are random, are asked at once, and get one token each. Cold is a vLLM that
finds nothing in its store; warm is another vLLM, asked the same after the first has
ended. The store runs on. Each vLLM has answered one other prompt before. Both must
answer the same. Hits are the share of the prompts' tokens that vLLM got from the store,
by its own metrics.

The ways:

    connector   vLLM with the connector, and one server
    lmcache     vLLM with LMCache, configured as the original InfiniStore's page says
    cluster     as connector, with a cluster of three servers
    disk        as connector, and what is warm is on the server's disk only
    windows     as connector, with a model like Gemma 3: five of six layers have a
                sliding window of 512 tokens, of which only the last is stored and read
    pair        one vLLM that prefills and one that decodes, behind a proxy
    kill        the store dies by SIGKILL while requests wait, and starts again empty:
                no request fails, and the same vLLM stores and finds blocks again
    overhead    nothing to reuse: rounds with the connector and without, in turns

Prompts of 768 tokens suit two cores, where each way takes a few minutes. A signal
(Ctrl-C) ends everything that was started.
"""

import argparse
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import trio
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

import infinistore
from programs import ProgramError, free_port
from served import BLOCK_TOKENS, SEED, Bench, Round, Vllm, cluster

OVERHEAD_ROUNDS = 4
OVERHEAD_AT_LEAST = 2
"""Rounds of each, however long they take."""
PAIR_TOKENS = 8


class Row(NamedTuple):
    """A line of the table; `same` is whether it answered as the first of its way."""

    way: str
    what: str
    round: Round
    same: bool


class Outcome(NamedTuple):
    """What a way has measured: rounds, and figures and a sentence of its own."""

    rows: list[Row]
    figures: dict[str, float]
    text: str = ""
    failed: bool = False


def connector(url: str, role: str = "kv_both") -> dict[str, Any]:
    """Return the settings of the connector, as docs/vllm.md has them."""
    return {
        "kv_connector": "InfiniStoreConnector",
        "kv_connector_module_path": "infinistore.integrations.vllm",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"url": url},
    }


async def reuse(
    bench: Bench,
    way: str,
    transfer: dict[str, Any],
    *,
    lmcache: Path | None = None,
    model: Path | None = None,
    between: Callable[[], Awaitable[None]] | None = None,
) -> Outcome:
    """One vLLM after the other, with a store that both use."""
    async with bench.vllm(transfer, lmcache=lmcache, model=model) as server:
        cold = await bench.round(f"{way}, cold", server)
    if between is not None:
        await between()
    async with bench.vllm(transfer, lmcache=lmcache, model=model) as server:
        warm = await bench.round(f"{way}, warm", server)
    same = cold.answers == warm.answers
    rows = [Row(way, "cold", cold, True), Row(way, "warm", warm, same)]
    return Outcome(rows, {"cold / warm": cold.ttft_mean_s / warm.ttft_mean_s}, failed=not warm.hit_tokens)


async def with_connector(bench: Bench) -> Outcome:
    async with bench.store() as store:
        return await reuse(bench, "connector", connector(f"infinistore://{store.address}"))


async def with_lmcache(bench: Bench) -> Outcome:
    async with bench.store() as store:
        config = {
            "chunk_size": 256,
            "remote_url": f"infinistore://{store.address}/?device=mlx5_1",
            "remote_serde": "naive",
            "local_cpu": False,
            "max_local_cpu_size": 2,  # GB through which each block goes
        }
        file = bench.folder / "lmcache.yaml"
        file.write_text(json.dumps(config))  # which is YAML, too
        names = {"kv_connector": "LMCacheConnectorOnCpu", "kv_connector_module_path": "lmcache_on_cpu"}
        return await reuse(bench, "lmcache", {**names, "kv_role": "kv_both"}, lmcache=file)


async def with_cluster(bench: Bench) -> Outcome:
    async with cluster(bench, 3) as url:
        return await reuse(bench, "cluster", connector(url))


async def with_disk(bench: Bench) -> Outcome:
    async with bench.store(disk=True) as store:
        url = f"infinistore://{store.address}"

        async def leave_on_disk() -> None:
            bench.tell("disk: what is in memory goes to disk")
            async with infinistore.open_store(url, deadline_s=300) as client:
                keys = await client.keys(limit=1_000_000)
                if await client.flush(keys) < len(keys):
                    raise ProgramError("the disk has no room for all that was stored")
                await client.evict(0, 0)

        return await reuse(bench, "disk", connector(url), between=leave_on_disk)


async def with_windows(bench: Bench) -> Outcome:
    model = await bench.make_model(bench.layers, bench.hidden, windows=True)
    async with bench.store() as store:
        return await reuse(bench, "windows", connector(f"infinistore://{store.address}"), model=model)


async def with_pair(bench: Bench) -> Outcome:
    """Through the proxy first; then the prefill server alone, which reads nothing."""
    alone = "--no-enable-prefix-caching"
    async with bench.store() as store:
        url = f"infinistore://{store.address}"
        async with (
            bench.vllm(connector(url, "kv_producer"), alone) as prefill,
            bench.vllm(connector(url, "kv_consumer"), alone) as decode,
            bench.proxy(prefill, decode) as proxy,
        ):
            by_proxy = await bench.round("pair, by the proxy", proxy, reader=decode, answer_tokens=PAIR_TOKENS)
            one = await bench.round("pair, one computes", prefill, answer_tokens=PAIR_TOKENS)
    rows = [Row("pair", "one alone", one, True), Row("pair", "by proxy", by_proxy, by_proxy.answers == one.answers)]
    return Outcome(rows, {}, failed=not by_proxy.hit_tokens)


async def ask_all(
    bench: Bench, server: Vllm, after: Callable[[int], Awaitable[None]] | None = None
) -> tuple[list[str], int]:
    """Ask all prompts at once; return the answers, empty where a request failed, and
    how many failed. `after` is called with the number of those that have ended.
    """
    answers, failed, ended = [""] * bench.prompts, 0, 0

    async def ask(number: int) -> None:
        nonlocal failed, ended
        try:
            answers[number] = await bench.ask(server, bench.prompt(f"kill {number}"), PAIR_TOKENS)
        except ProgramError:
            failed += 1
        ended += 1
        bench.advance(1 / bench.prompts)
        if after is not None:
            await after(ended)

    async with trio.open_nursery() as nursery:
        for number in range(bench.prompts):
            nursery.start_soon(ask, number)
    return answers, failed


async def with_kill(bench: Bench) -> Outcome:
    async with trio.open_nursery() as nursery:
        port = free_port()
        first, second = trio.Event(), trio.Event()
        dead, done = trio.Event(), trio.Event()

        async def run_stores() -> None:
            async with bench.store(port=port) as store:
                first.set()
                await dead.wait()
                await store.program.kill()
            async with bench.store(port=port):
                second.set()
                await done.wait()

        nursery.start_soon(run_stores)
        await first.wait()
        transfer = connector(f"infinistore://127.0.0.1:{port}")

        async def kill_early(ended: int) -> None:
            if ended == -(-bench.prompts // 3):
                dead.set()
            if ended == -(-2 * bench.prompts // 3):
                await second.wait()

        async with bench.vllm(transfer, "--no-enable-prefix-caching") as server:
            bench.tell("kill: the store dies when a third of the requests have ended")
            answers, failed = await ask_all(bench, server, kill_early)
            hits, rounds, same = 0, 0, True
            while not hits and rounds < 5:
                rounds += 1
                bench.tell("kill: the store is back")
                before = await bench.hit_tokens(server)
                again, more = await ask_all(bench, server)
                failed, same = failed + more, same and again == answers
                hits = await bench.hit_tokens(server) - before
        done.set()
    figures: dict[str, float] = {"failed": failed, "rounds until found": rounds, "hit tokens": hits, "same": same}
    text = f"the store was killed: {failed} requests failed; back again, {hits} tokens came from it"
    text += f" in round {rounds} of the same prompts, {'the same answers' if same else 'OTHER ANSWERS'}"
    return Outcome([], figures, text, failed=bool(failed) or not hits or not same)


async def with_overhead(bench: Bench) -> Outcome:
    alone = "--no-enable-prefix-caching"
    rates: dict[str, list[float]] = {"with": [], "without": []}
    async with bench.store() as store:
        transfer = connector(f"infinistore://{store.address}")
        async with (
            bench.vllm(transfer, alone, unbound=True) as using,
            bench.vllm(None, alone, unbound=True) as without,
        ):
            began = trio.current_time()
            for number in range(OVERHEAD_ROUNDS):
                if number >= OVERHEAD_AT_LEAST and trio.current_time() - began > 60 * bench.overhead_minutes:
                    bench.advance(2 * (OVERHEAD_ROUNDS - number))
                    break
                pair = [("with", using), ("without", without)]
                for name, server in pair if number % 2 else reversed(pair):
                    what = f"overhead, {name} the connector, {number + 1} of {OVERHEAD_ROUNDS}"
                    made = await bench.round(what, server, seed=SEED + 1 + number)  # prompts that nobody has stored
                    rates[name].append(made.prompts_a_s)
    ratio = statistics.median(rates["with"]) / statistics.median(rates["without"])
    rounds = len(rates["with"])
    each = "; ".join(f"{name}: {', '.join(f'{rate:.2f}' for rate in rates[name])}" for name in rates)
    text = f"with nothing to reuse, the connector has {ratio:.3f} of the throughput without (prompts/s {each})"
    return Outcome([], {"ratio": ratio, "rounds": rounds}, text)


WAYS: dict[str, tuple[Callable[[Bench], Awaitable[Outcome]], float]] = {
    "connector": (with_connector, 4),
    "lmcache": (with_lmcache, 4),
    "cluster": (with_cluster, 4),
    "disk": (with_disk, 4),
    "windows": (with_windows, 4),
    "pair": (with_pair, 4),
    "kill": (with_kill, 3),
    "overhead": (with_overhead, 2 + 2 * OVERHEAD_ROUNDS),
}
"""Each way, and how many starts and rounds it has."""


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
        "--overhead-minutes",
        type=float,
        default=4,
        metavar="MINUTES",
        help=f"overhead begins no round after this, but has at least {OVERHEAD_AT_LEAST} of each; default: 4",
    )
    parser.add_argument("--limit", type=float, default=60, metavar="MINUTES", help="give up after this; default: 60")
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
    if given.limit <= 0 or given.overhead_minutes <= 0:
        parser.error("--limit and --overhead-minutes: more than 0 minutes")
    return given


async def run(given: argparse.Namespace, folder: Path, console: Console, outcomes: dict[str, Outcome]) -> int:
    """Measure all ways, and add what comes of each; return the status to end with."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%"), TimeElapsedColumn())
    status = 0
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
                        outcomes[way] = await WAYS[way][0](bench)
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
    """Run it; 1 if a request failed, an answer differed, or nothing was found."""
    given = parse()
    console = Console(stderr=True)
    with ExitStack() as stack:
        folder = given.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="serve-bench-")))
        folder.mkdir(parents=True, exist_ok=True)
        error: BaseException | None = None
        status, made = 1, dict[str, Outcome]()
        for number in (signal.SIGINT, signal.SIGTERM):  # one that comes at the very end ends nothing early
            signal.signal(number, lambda *_: None)
        try:
            status = trio.run(run, given, folder, console, made)
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
    return status or int(any(outcome.failed or not all(row.same for row in outcome.rows) for outcome in made.values()))


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
