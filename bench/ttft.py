"""Time to first token, cold and warm: vLLM with the connector, vLLM with LMCache, and
transformers, over one store.

    make ttft TTFT_ARGS="--plot ttft.png"
    python bench/ttft.py [--ways vllm lmcache lmcache-plugin transformers pair] [--tokens 256 1024 2048] [--plot FILE]

A small Llama with random weights is made here. Cold is a prompt that nobody has seen,
in an engine that has the store but finds nothing there; warm is the same prompt in
another process, which reads what the first has written. Before either is timed, the
engine has answered another prompt of the same length. Engines have no prefix cache of
their own. Figures are medians of several prompts. Cold and warm must answer with the
same tokens.

`pair` is one vLLM that only prefills and one that only decodes, each in its process.
`overhead` is vLLM with the connector and nothing to reuse, against vLLM without, prompt
by prompt in turns. `read` is how fast the connector reads a prompt's blocks, against
one `get_many_into` of the same keys. `disk` is the longest prompt in vLLM: warm from memory,
and from a disk after a restart of the server, which then has nothing in memory; each in
a process of its own.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from rich.console import Console
from rich.status import Status
from rich.table import Table

from engine_process import Answer, EngineProcess
from one_server import serving
from rounds import interleaved
from small_llama import VOCABULARY

WAYS = ("vllm", "lmcache", "lmcache-plugin", "transformers", "pair", "overhead", "read", "disk")
TITLES = {
    "vllm": "vLLM + connector",
    "lmcache": "vLLM + LMCache + drop-in API",
    "lmcache-plugin": "vLLM + LMCache + plugin",
    "transformers": "transformers",
    "pair": "vLLM, prefill / decode",
}
CONNECTOR = {
    "kv_connector": "InfiniStoreConnector",
    "kv_connector_module_path": "infinistore.integrations.vllm",
    "kv_load_failure_policy": "recompute",
}
BLOCK_TOKENS = 32
ANSWER_TOKENS = 4


class Timing(NamedTuple):
    """One way at one length: medians in seconds, and how many tokens of the prompt were
    not computed when warm.
    """

    way: str
    tokens: int
    cold_s: float
    warm_s: float
    cached_tokens: int
    same: bool

    @property
    def ratio(self) -> float:
        return self.cold_s / self.warm_s


class Bench:
    """What all ways share: the model, the store, and how often to ask."""

    def __init__(self, given: argparse.Namespace, folder: Path, url: str, status: Status) -> None:
        self.model = folder / "model"
        self.url = url
        self.lengths: list[int] = given.tokens
        self.prompts: int = given.prompts
        self.pool: str = given.pool
        self.folder = folder
        self._status = status
        self._made = 0

    def tell(self, text: str) -> None:
        """Show what is being done."""
        self._status.update(text)

    def prompt(self, tokens: int, number: int) -> list[int]:
        """Return a prompt that begins like no other one."""
        generator = random.Random(f"{tokens}/{number}")
        return [generator.randrange(VOCABULARY) for _ in range(tokens)]

    def log(self, name: str) -> IO[str]:
        """Return where an engine writes what it has to say."""
        self._made += 1
        return (self.folder / f"{self._made:02d}-{name}.log").open("w")

    @contextmanager
    def vllm(self, transfer: dict[str, Any] | None, name: str, **environment: str) -> Iterator[EngineProcess]:
        """Run vLLM with these settings of a connector."""
        settings: dict[str, Any] = {"model": str(self.model), "enable_prefix_caching": False}
        if transfer is not None:
            settings["kv_transfer_config"] = transfer
        with self.log(name) as log, EngineProcess("vllm_engine.py", settings, environment=environment, log=log) as made:
            self.tell(f"{name}: vLLM starts")
            made.wait_until_ready()
            yield made

    @contextmanager
    def engine(self, way: str, role: str) -> Iterator[EngineProcess]:
        """Run the engine of a way; `role` is kv_both, or that of one of a pair."""
        name = f"{way}-{role}"
        if way == "transformers":
            settings = {"model": str(self.model), "url": self.url}
            with self.log(name) as log, EngineProcess("transformers_engine.py", settings, log=log) as made:
                made.wait_until_ready()
                yield made
        elif way.startswith("lmcache"):
            transfer = {"kv_connector": "LMCacheConnectorOnCpu", "kv_connector_module_path": "lmcache_on_cpu"}
            config = self._lmcache_config(way)
            environment = {"LMCACHE_CONFIG_FILE": str(config), "LMCACHE_TRACK_USAGE": "false"}
            with self.vllm({**transfer, "kv_role": role}, name, **environment) as made:
                yield made
        else:
            extra = {"url": self.url, "namespace": way}
            with self.vllm({**CONNECTOR, "kv_role": role, "kv_connector_extra_config": extra}, name) as made:
                yield made

    def _lmcache_config(self, way: str) -> Path:
        config: dict[str, Any] = {"chunk_size": 256, "local_cpu": False, "max_local_cpu_size": 1}
        if way == "lmcache":
            config |= {"remote_url": f"{self.url}?device=", "remote_serde": "naive"}
        else:
            place = "remote_storage_plugin.infinistore."
            config["remote_storage_plugins"] = ["infinistore"]
            config["extra_config"] = {
                f"{place}module_path": "infinistore.integrations.lmcache",
                f"{place}class_name": "InfiniStoreConnectorAdapter",
                f"{place}url": self.url,
            }
        file = self.folder / f"{way}.yaml"
        file.write_text(json.dumps(config))  # which is YAML, too
        return file

    def ask_all(self, engine: EngineProcess, what: str, *, warm_up: int, max_tokens: int) -> dict[int, list[Answer]]:
        """Ask each prompt by itself, longest first; return the answers by length.
        `warm_up` tells a prompt apart.
        """
        return {
            tokens: self.ask(engine, what, tokens, warm_up=warm_up, max_tokens=max_tokens)
            for tokens in sorted(self.lengths, reverse=True)
        }

    def ask(self, engine: EngineProcess, what: str, tokens: int, *, warm_up: int, max_tokens: int) -> list[Answer]:
        """Ask the prompts of one length."""
        engine.ask([self.prompt(tokens, -warm_up)], max_tokens=max_tokens)
        answers: list[Answer] = []
        for number in range(self.prompts):
            self.tell(f"{what}: {tokens} tokens, prompt {number + 1} of {self.prompts}")
            answers += engine.ask([self.prompt(tokens, number)], max_tokens=max_tokens)
        return answers

    def timings(self, way: str, cold: dict[int, list[Answer]], warm: dict[int, list[Answer]]) -> Iterator[Timing]:
        """Put the answers of two engines side by side."""
        for tokens in self.lengths:
            same = all(
                one.tokens[: len(other.tokens)] == other.tokens[: len(one.tokens)]
                for one, other in zip(cold[tokens], warm[tokens], strict=True)
            )
            cached = min(answer.cached_tokens for answer in warm[tokens])
            yield Timing(way, tokens, first_s(cold[tokens]), first_s(warm[tokens]), cached, same)


def first_s(answers: Sequence[Answer]) -> float:
    """Return the median time to first token, in seconds."""
    return statistics.median(answer.first_token_s for answer in answers)


def reuse(bench: Bench, way: str) -> list[Timing]:
    """One engine writes, and another one reads."""
    with bench.engine(way, "kv_both") as writer:
        cold = bench.ask_all(writer, f"{way}, cold", warm_up=1, max_tokens=ANSWER_TOKENS)
    if any(answer.cached_tokens for answers in cold.values() for answer in answers):
        raise RuntimeError(f"{way}: the store had prompts that nobody has asked before")
    with bench.engine(way, "kv_both") as reader:
        warm = bench.ask_all(reader, f"{way}, warm", warm_up=2, max_tokens=ANSWER_TOKENS)
    return list(bench.timings(way, cold, warm))


def pair(bench: Bench) -> list[Timing]:
    """One engine prefills, and another one, which runs at the same time, decodes."""
    with bench.engine("pair", "kv_producer") as prefill, bench.engine("pair", "kv_consumer") as decode:
        cold = bench.ask_all(prefill, "pair, prefill", warm_up=1, max_tokens=1)
        warm = bench.ask_all(decode, "pair, decode", warm_up=2, max_tokens=ANSWER_TOKENS)
    return list(bench.timings("pair", cold, warm))


def overhead(bench: Bench) -> dict[str, float]:
    """Prefill with the connector and nothing to reuse, and without the connector, in
    turns.
    """
    tokens = max(bench.lengths)
    rounds = 2 * bench.prompts + 1
    with bench.vllm(None, "without") as without, bench.engine("overhead", "kv_both") as using:
        numbers = iter(range(1_000_000))  # no prompt twice

        def ask(engine: EngineProcess) -> Callable[[], object]:
            return lambda: engine.ask([bench.prompt(tokens, next(numbers))], max_tokens=1)

        bench.tell(f"overhead: {rounds} prompts of {tokens} tokens, with and without the connector in turns")
        times = interleaved({"with": ask(using), "without": ask(without)}, rounds=rounds, calls=1, warm_up=1)
    return {"with_s": times["with"], "without_s": times["without"], "ratio": times["with"] / times["without"]}


def read(bench: Bench) -> dict[str, float]:
    """What the connector's worker reads of a prompt, and one get of the same keys into
    the same memory.
    """
    import logging

    import torch

    from infinistore import blocking
    from infinistore.integrations.internal.record import Record
    from infinistore.integrations.vllm.background import Background
    from infinistore.integrations.vllm.blocks import Blocks, LayerGroup, Load, Step, block_names, layer_labels
    from infinistore.integrations.vllm.settings import ConnectorSettings
    from infinistore.integrations.vllm.worker import WorkerSide

    config = json.loads((bench.model / "config.json").read_text())
    heads, layers = config["num_key_value_heads"], [f"layers.{i}" for i in range(config["num_hidden_layers"])]
    count = max(bench.lengths) // BLOCK_TOKENS
    hashes, ids = [f"{number:032x}" for number in range(count)], list(range(count))
    cache = torch.rand(len(layers), count, heads, BLOCK_TOKENS, 128)
    labels = layer_labels(layers)
    names = block_names({}, model="read", namespace="bench", layers=tuple(labels.values()), shards=1)
    groups = [LayerGroup(names.layers, BLOCK_TOKENS)]
    with blocking.open_store(bench.url) as store:
        record = Record(logging.getLogger("bench"), bench.url)
        settings = ConnectorSettings(url=bench.url)
        background = Background(record)
        worker = WorkerSide(store, names, settings, record, groups=groups, layers=labels, background=background)
        worker.register(dict(zip(layers, cache, strict=True)), count)
        array: Any = cache.numpy()
        memory = memoryview(array).cast("B")
        size = cache[0, 0].nbytes
        blocks = [
            (names.key(block, 0, str(layer)), memory[(layer * count + number) * size :][:size])
            for layer in range(len(layers))
            for number, block in enumerate(hashes)
        ]
        store.put_many(blocks)

        def by_connector() -> None:
            worker.begin(Step(loads=[Load("r", [Blocks(hashes, ids)])]))
            worker.start_loads()
            while not worker.poll(())[1]:
                pass
            if worker.take_failed_blocks():
                raise RuntimeError("the connector could not read what is there")

        bench.tell(f"read: {len(blocks)} blocks of {size // 1024} KiB")
        calls = {"connector": by_connector, "direct": lambda: store.get_many_into(blocks)}
        times = interleaved(calls, rounds=15, calls=3)
        background.close()
        worker.close()
    gib = cache.nbytes / 2**30
    rates = {f"{name}_gib_s": gib / seconds for name, seconds in times.items()}
    return {**rates, "ratio": times["direct"] / times["connector"]}


def disk(bench: Bench) -> dict[str, float]:
    """The longest prompt, from memory, and from disk after a restart of the server."""
    from infinistore import blocking

    tokens = max(bench.lengths)

    def ask(role: str, what: str, warm_up: int) -> list[Answer]:
        with bench.engine("vllm", role) as engine:
            return bench.ask(engine, f"disk, {what}", tokens, warm_up=warm_up, max_tokens=ANSWER_TOKENS)

    with ExitStack() as stack:
        stack.callback(setattr, bench, "url", bench.url)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=bench.folder)))
        with running_store(folder, bench.pool, disk=True) as bench.url:
            cold = ask("kv_both", "cold", 1)
            memory = ask("kv_consumer", "from memory", 2)
            with blocking.open_store(bench.url) as store:
                keys = store.keys(limit=100_000)
                if store.flush(keys) < len(keys):
                    raise RuntimeError("the disk has no room for all that was stored")
        with running_store(folder, bench.pool, disk=True) as bench.url:
            from_disk = ask("kv_consumer", "from disk", 3)
            with blocking.open_store(bench.url) as store:
                figures = store.stats().disk
    if figures is None or not sum(each.read_blocks for each in figures.disks):
        raise RuntimeError("nothing was read from disk")
    for answers in (memory, from_disk):
        if any(not answer.cached_tokens for answer in answers):
            raise RuntimeError("the store had lost a prompt")
        if [answer.tokens for answer in answers] != [answer.tokens for answer in cold]:
            raise RuntimeError("a prompt was answered with other tokens")
    times = {"cold_s": first_s(cold), "memory_s": first_s(memory), "disk_s": first_s(from_disk)}
    return {**times, "ratio": times["disk_s"] / times["memory_s"]}


OTHERS = {"overhead": overhead, "read": read, "disk": disk}


@contextmanager
def running_store(folder: Path, pool: str, *, disk: bool = False) -> Iterator[str]:
    """Run a server, with as much disk as memory or none; yield its address."""
    disks = ["--disk", f"{folder / 'disk'}:{pool}", "--disk-admission", "eager"] if disk else []
    with serving("--manage-port", "0", *disks, "--prealloc-size", pool, "--log-level", "error") as address:
        yield f"infinistore://{address}"


def table_of(timings: Sequence[Timing]) -> Table:
    """Return what people read."""
    table = Table(title="Time to first token")
    for column in ("way", "tokens", "cold, s", "warm, s", "cold / warm", "not computed", "same tokens"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for t in timings:
        last = table.row_count + 1 == len(timings) or timings[table.row_count + 1].way != t.way
        figures = [f"{t.cold_s:.3f}", f"{t.warm_s:.3f}", f"{t.ratio:.1f}", str(t.cached_tokens)]
        table.add_row(TITLES[t.way], str(t.tokens), *figures, "yes" if t.same else "NO", end_section=last)
    return table


def plot(timings: Sequence[Timing], file: Path) -> None:
    """Draw cold and warm times over the length of the prompt."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for number, way in enumerate(dict.fromkeys(t.way for t in timings)):
        those = sorted((t for t in timings if t.way == way), key=lambda t: t.tokens)
        tokens, color = [t.tokens for t in those], f"C{number}"
        axes.plot(tokens, [t.cold_s for t in those], "o--", color=color, label=f"{TITLES[way]}, cold")
        axes.plot(tokens, [t.warm_s for t in those], "o-", color=color, label=f"{TITLES[way]}, warm")
    lengths = sorted({t.tokens for t in timings})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(tokens) for tokens in lengths])
    axes.set_yscale("log")
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("time to first token, s")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Time to first token, cold and warm.")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[256, 512, 1024, 2048], help="lengths of prompts")
    parser.add_argument("--prompts", type=int, default=3, help="prompts of each length")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model")
    parser.add_argument("--hidden", type=int, default=1152, help="its hidden size, a multiple of 64")
    parser.add_argument("--pool", default="3GiB", help="the pool of the store")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="save a plot; the name's end says in which format")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the model and what the engines said here")
    given = parser.parse_args(arguments)
    if min(given.tokens) < 2 * BLOCK_TOKENS or max(given.tokens) > 4000 or given.prompts < 1:
        parser.error(f"prompts have {2 * BLOCK_TOKENS} to 4000 tokens, and there is at least one of each length")
    return given


def main() -> int:
    """Run it; 1 if cold and warm did not agree."""
    given = parse()
    errors = Console(stderr=True)
    timings: list[Timing] = []
    more: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        folder = given.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ttft-")))
        folder.mkdir(parents=True, exist_ok=True)
        status = stack.enter_context(errors.status("making the model"))
        make = [sys.executable, str(Path(__file__).with_name("small_llama.py")), str(folder / "model")]
        sizes = ["--layers", str(given.layers), "--hidden", str(given.hidden)]
        subprocess.run([*make, *sizes], check=True, capture_output=True)
        bench = Bench(given, folder, stack.enter_context(running_store(folder, given.pool)), status)
        try:
            for way in given.ways:
                if way in OTHERS:
                    more[way] = OTHERS[way](bench)
                    errors.print(f"{way}: {more[way]['ratio']:.3f}")
                    continue
                of_way = pair(bench) if way == "pair" else reuse(bench, way)
                timings += of_way
                for t in of_way:
                    same = "the same tokens" if t.same else "OTHER TOKENS"
                    errors.print(f"{t.way}, {t.tokens} tokens: cold {t.cold_s:.3f} s, warm {t.warm_s:.3f} s, {same}")
        except RuntimeError as error:
            for log in sorted(folder.glob("*.log"))[-2:]:
                errors.print(f"{log}:", *log.read_text().splitlines()[-20:], sep="\n", markup=False)
            errors.print(f"gave up: {error}", markup=False)
            return 1
    report(given, timings, more)
    return 0 if all(t.same for t in timings) else 1


def report(given: argparse.Namespace, timings: Sequence[Timing], more: dict[str, dict[str, float]]) -> None:
    """Print, and draw."""
    if given.json:
        print(json.dumps({"timings": [{**t._asdict(), "ratio": t.ratio} for t in timings], **more}, indent=2))
    else:
        console = Console()
        if timings:
            console.print(table_of(timings))
        if "overhead" in more:
            console.print(
                "prefill with the connector and nothing to reuse: {ratio:.3f} of without".format(**more["overhead"])
            )
        if "read" in more:
            text = "the connector's read of a longest prompt: {ratio:.2f} of one get ({connector_gib_s:.2f} GiB/s)"
            console.print(text.format(**more["read"]))
        if "disk" in more:
            text = "a longest prompt from disk after a restart: {disk_s:.3f} s, {ratio:.2f} of from memory"
            console.print(text.format(**more["disk"]))
    if given.plot and timings:
        plot(timings, given.plot)
        Console(stderr=True).print(f"plot saved to {given.plot}")


if __name__ == "__main__":
    sys.exit(main())
