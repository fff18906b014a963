"""What the vLLM connector takes of vLLM's scheduler, without vLLM: prompts that are
stored, and prompts of which nothing is.

    python bench/vllm_lookups.py [--tokens 2048] [--quick] [--json]

The server is a process of its own on this machine. Beside each time stand the processor
time of the scheduler's process, and the time of a ping: one `exists` of one key, in the
same rounds. A request of vLLM is looked up once, and once a second while it waits. What
is found is loaded, in the next step; what is not is saved, here in two steps of half a
prompt. `load` and `save` are all of that, the look-up included.

While other requests are computed, a step goes on before a look-up has ended if that
takes long. `step` is how long it waits for a hit then, the median and the 99th
percentile, and which share of the hits is known in the same step.
"""

import argparse
import json
import logging
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import attrs
from rich.console import Console
from rich.table import Table

from infinistore.blocking import BlockingStore, open_store
from infinistore.integrations.internal.prefix_keys import PrefixChain
from infinistore.integrations.internal.record import Record
from infinistore.integrations.vllm.blocks import BlockNames, LayerGroup, block_names
from infinistore.integrations.vllm.scheduler import SchedulerSide

MODELS = {
    "8 layers, blocks of 32": (8, 32, 1),
    "32 layers, blocks of 16": (32, 16, 1),
    "80 layers, blocks of 16, 8 ranks": (80, 16, 8),
}
"""Layers, tokens of a block, ranks of tensor parallelism."""
VALUE = b"x" * 64
COLUMNS = ("hit", "miss", "load", "save", "ping")


@attrs.define(eq=False)
class Prompt:
    """What the scheduler knows of a request."""

    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    priority: int = 0
    kv_transfer_params: None = None


class Model:
    """A model of which one prompt is stored."""

    def __init__(self, store: BlockingStore, name: str, tokens: int) -> None:
        layers, block_tokens, shards = MODELS[name]
        labels = tuple(map(str, range(layers)))
        names: BlockNames = block_names({"name": name}, model="bench", namespace="", layers=labels, shards=shards)
        groups = (LayerGroup(labels, block_tokens),)
        record = Record(logging.getLogger("bench"), "of a benchmark")
        self._threads = ThreadPoolExecutor(4)
        self._scheduler = SchedulerSide(
            *(store, names, record), groups=groups, reads=True, writes=True, in_thread=self._threads.submit
        )
        self._stored = [random.Random(1).randrange(1 << 17) for _ in range(tokens + 1)]
        self._found = tokens // block_tokens * block_tokens
        self._table = [list(range(1, 1 + tokens // block_tokens))]
        self._number = 0
        keys = names.all_keys(PrefixChain(block_tokens, group_blocks=names.group_blocks).extend(self._stored))
        for first in range(0, len(keys), 8192):
            store.put_many(dict.fromkeys(keys[first : first + 8192], VALUE))
        self.keys = len(keys)

    def hit(self) -> None:
        """Look up the prompt that is stored."""
        self._look_up(self._stored, self._found)

    def load(self) -> None:
        """Have it loaded."""
        self._schedule(self._stored, self._found)

    def miss(self) -> None:
        """Look up one that is not."""
        self._look_up([-1 - self._number, *self._stored[1:]], 0)

    def save(self) -> None:
        """Have one saved that is not."""
        self._schedule([-1 - self._number, *self._stored[1:]], 0)

    def steps(self, rounds: int) -> tuple[float, float, float]:
        """Return how long a step that computes waits for a hit, in milliseconds, the
        median and the 99th percentile, and the share of hits that it knows then."""
        times, known = [], 0
        for _ in range(rounds):
            self._scheduler.plan({"running": 1}, (), lambda _: self._table)
            self._number += 1
            prompt = Prompt(str(self._number), self._stored, len(self._stored))
            began = time.perf_counter()
            found = self._scheduler.loadable_tokens(prompt, 0)
            times.append(1e3 * (time.perf_counter() - began))
            known += found is not None
            self._scheduler.plan({}, (), lambda _: self._table)
            assert self._scheduler.loadable_tokens(prompt, 0) == self._found
            self._scheduler.finished(prompt)
        return statistics.median(times), statistics.quantiles(times, n=100)[98], known / rounds

    def close(self) -> None:
        """End its threads."""
        self._threads.shutdown()

    def _look_up(self, tokens: list[int], expected: int) -> None:
        self._scheduler.finished(self._looked_up(tokens, expected))

    def _looked_up(self, tokens: list[int], expected: int) -> Prompt:
        self._number += 1
        prompt = Prompt(str(self._number), tokens, len(tokens))
        self._scheduler.plan({}, (), lambda _: self._table)  # nothing is computed, so that it waits
        found = self._scheduler.loadable_tokens(prompt, 0)
        assert found == expected, (found, expected)
        return prompt

    def _schedule(self, tokens: list[int], expected: int) -> None:
        prompt = self._looked_up(tokens, expected)
        scheduler = self._scheduler
        scheduler.allocated(prompt, self._table, expected)
        if expected:
            assert len(scheduler.plan({}, (), lambda _: self._table).loads) == 1
            scheduler.loads_ended([prompt.request_id], ())
            prompt.num_computed_tokens = expected
        saved = 0
        while left := min(len(tokens) - prompt.num_computed_tokens, len(tokens) // 2 + 1):
            step = scheduler.plan({prompt.request_id: left}, (), lambda _: self._table)
            saved += sum(len(save.blocks.hashes) for save in step.saves)
            prompt.num_computed_tokens += left
        assert saved == (0 if expected else len(self._table[0]))
        scheduler.finished(prompt)


@contextmanager
def server() -> Iterator[str]:
    """Run a server; give its URL."""
    command = [sys.executable, "-m", "infinistore", "--service-port", "0", "--manage-port", "off", "--json"]
    command += ["--prealloc-size", "128MiB", "--minimal-allocate-size", "512B", "--unix-socket", "auto"]
    with subprocess.Popen([*command, "--log-level", "warning"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["listening"][0]
        finally:
            process.terminate()


def measured(things: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, tuple[float, float]]:
    """Return the median time and processor time of one call of each, in milliseconds."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in things}
    generator = random.Random(2)
    for number in range(rounds + 5):
        for name in generator.sample(list(things), len(things)):
            began, used = time.perf_counter(), time.process_time()
            things[name]()
            if number >= 5:
                times[name].append((1e3 * (time.perf_counter() - began), 1e3 * (time.process_time() - used)))
    return {
        name: (statistics.median(took for took, _ in of), statistics.median(used for _, used in of))
        for name, of in times.items()
    }


def main() -> None:
    """Run, and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a prompt; default: 2048")
    parser.add_argument("--quick", action="store_true", help="30 rounds instead of 200")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    if not 64 <= given.tokens <= 32768:
        parser.error(f"--tokens: from 64 to 32768, not {given.tokens}")
    made: dict[str, dict[str, tuple[float, float]]] = {}
    steps: dict[str, tuple[float, float, float]] = {}
    keys: dict[str, int] = {}
    with server() as url, open_store(url, deadline_s=60) as store:
        store.put("ping", VALUE)
        for name in MODELS:
            model = Model(store, name, given.tokens)
            things: dict[str, Callable[[], object]] = {
                "hit": model.hit,
                "miss": model.miss,
                "load": model.load,
                "save": model.save,
                "ping": partial(store.exists, "ping"),
            }
            made[name] = measured(things, 30 if given.quick else 200)
            steps[name] = model.steps(100 if given.quick else 1000)
            model.close()
            keys[name] = model.keys
            store.purge()
    if given.json:
        rows = {name: {"keys": keys[name], **row, "step": steps[name]} for name, row in made.items()}
        print(json.dumps(rows, indent=2))
        return
    table = Table(title=f"look-ups of {given.tokens} tokens: ms (ms of the scheduler's processor)")
    for column in ("model", "keys", *COLUMNS, "step, p99, known"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, row in made.items():
        cells = [f"{took:.3f} ({used:.3f})" for took, used in (row[column] for column in COLUMNS)]
        median, worst, known = steps[name]
        table.add_row(name, str(keys[name]), *cells, f"{median:.3f}, {worst:.3f}, {known:.0%}")
    Console(width=120 if not sys.stdout.isatty() else None).print(table)


if __name__ == "__main__":
    main()
