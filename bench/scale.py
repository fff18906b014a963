"""What an operation costs as the work grows: keys, clients, the pool, and the length of
a prefix.

    python bench/scale.py [--quick] [--json | --markdown] [--check] [--only keys]

Each line is one operation. Its cost is processor time, of the server (`--spin-time 0`)
where there is one, and the last column is the exponent that fits the figures best, in
cost = c * work ^ exponent: 0.0 stays the same, 1.0 grows with the work. The sizes take
turns in each round, and medians are fitted. With `--check` the exit status is 1 if an
exponent is 0.1 or more, except where the reason is known: these lines are marked with a
star.

- keys: 10^3 to 10^6 blocks of 64 bytes in a server. Each call names the keys of one
  prompt, which were put one after the other, or (starred) keys drawn from all: the
  processor's cache holds the index of 10^4 keys and not that of 10^6. A plain dict with
  as many keys, in nanoseconds for one that is drawn, says what that costs at least.
- clients: 1 to 64 connections, each of which calls in its turn.
- pool: 1 to 16 GiB, full of blocks of 64 KiB, of which puts (starred) evict some. They
  take as many steps in each; but the coldest blocks of a pool are those whose entries
  no cache of the processor holds. No page of it is touched. Statistics (starred) look
  for the largest free extent in all of it.
- prefix: what one key costs in a match_prefix of 100 to 10,000.
"""

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

from core import key_batches, open_core, put
from infinistore.blocking import BlockingStore, open_store
from infinistore.errors import OutOfMemory
from peers.systems import process_cpu_s
from rounds import add_common_arguments

KIB, GIB = 1024, 1024**3
BLOCK_BYTES = 64
MOST = 0.1
Costs = dict[str, dict[int, list[float]]]
"""The microseconds of an operation in each round, by its name and the size of the work."""


class Served:
    """A server with blocks, and a client of it."""

    def __init__(self, keys: int, until_end: ExitStack) -> None:
        folder = Path(until_end.enter_context(tempfile.TemporaryDirectory(prefix="infinistore-scale-")))
        self._process = until_end.enter_context(_server(folder / "store.sock", 2 * max(keys, 10_000) * BLOCK_BYTES))
        self.url = f"unix://{folder}/store.sock?spin_us=0"
        self.store = until_end.enter_context(open_store(self.url))
        self.keys = [key for batch in key_batches(keys, 1000) for key in batch]
        data = bytes(BLOCK_BYTES)
        for first in range(0, keys, 1000):
            self.store.put_many([(key, data) for key in self.keys[first : first + 1000]])

    def cost_us(self, call: Callable[[], object], calls: int) -> float:
        """Return the server's processor time for a call."""
        before = process_cpu_s(self._process.pid)
        for _ in range(calls):
            call()
        return (process_cpu_s(self._process.pid) - before) / calls * 1e6


@contextmanager
def _server(path: Path, pool_bytes: int) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "infinistore", "--service-port", "0", "--manage-port", "off", "--json"]
    command += ["--unix-socket", str(path), "--prealloc-size", f"{pool_bytes}B", "--spin-time", "0"]
    command += ["--minimal-allocate-size", f"{BLOCK_BYTES}B", "--log-level", "warning"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            json.loads(process.stdout.readline())
            yield process
        finally:
            process.terminate()


def by_keys(sizes: Sequence[int], rounds: int, calls: int) -> Costs:
    """Measure requests among more and more keys."""
    costs: Costs = {}
    with ExitStack() as until_end:
        servers = {size: Served(size, until_end) for size in sizes}
        plain = {size: dict.fromkeys(served.keys, 0) for size, served in servers.items()}
        generator = random.Random(1)
        for number in range(rounds):
            for size in generator.sample(sizes, len(sizes)):
                served = servers[size]
                for name, call in _requests(served, generator, number).items():
                    costs.setdefault(name, {}).setdefault(size, []).append(served.cost_us(call, calls))
                drawn = generator.choices(served.keys, k=100_000)
                start = time.process_time()
                found = sum(map(plain[size].__getitem__, drawn))
                taken = (time.process_time() - start - found) / len(drawn) * 1e9
                costs.setdefault("a plain dict, ns *", {}).setdefault(size, []).append(taken)
    return costs


def _requests(served: Served, generator: random.Random, number: int) -> Mapping[str, Callable[[], object]]:
    """Return requests, which name other keys each time."""
    store, keys = served.store, served.keys
    target = memoryview(bytearray(64 * BLOCK_BYTES))
    places = [target[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES] for i in range(64)]
    data = bytes(BLOCK_BYTES)
    new = (f"new/{number}/{i}" for i in range(1_000_000))

    def prompt() -> list[str]:
        first = generator.randrange(len(keys) - 63)
        return keys[first : first + 64]

    def put_and_delete() -> None:
        written = [next(new) for _ in range(64)]
        store.put_many([(key, data) for key in written])
        store.delete(written)

    return {
        "exists, 1 key": lambda: store.exists(keys[generator.randrange(len(keys))]),
        "match_prefix, 64 keys": lambda: store.match_prefix(prompt()),
        "match_prefix, 64 drawn *": lambda: store.match_prefix(generator.sample(keys, 64)),
        "get_many_into, 64": lambda: store.get_many_into(list(zip(prompt(), places, strict=True))),
        "put_many, 64 again": lambda: store.put_many([(key, data) for key in prompt()]),
        "put_many and delete, 64": put_and_delete,
    }


def by_clients(sizes: Sequence[int], rounds: int, calls: int) -> Costs:
    """Measure requests of more and more clients, one after the other."""
    costs: Costs = {}
    with ExitStack() as until_end:
        served = Served(10_000, until_end)
        opened: list[BlockingStore] = []
        generator = random.Random(1)
        for size in sizes:  # not in turns: those that are open stay
            opened += [until_end.enter_context(open_store(served.url)) for _ in range(size - len(opened))]
            turns = cycle(opened)
            for store in opened:  # connects for good
                store.exists("nothing")
            requests = {
                "exists, 1 key": partial(_exists, turns, generator, served.keys),
                "match_prefix, 64 keys": partial(_match, turns, generator, served.keys),
            }
            for name, call in requests.items():
                figures = [served.cost_us(call, max(calls, 2 * size)) for _ in range(rounds)]
                costs.setdefault(name, {})[size] = figures
    return costs


def _exists(stores: Iterator[BlockingStore], generator: random.Random, keys: Sequence[str]) -> None:
    next(stores).exists(generator.choice(keys))


def _match(stores: Iterator[BlockingStore], generator: random.Random, keys: Sequence[str]) -> None:
    next(stores).match_prefix(generator.sample(keys, 64))


def by_pool(sizes: Sequence[int], rounds: int, calls: int) -> Costs:
    """Measure puts that evict, and statistics, in larger and larger pools."""
    costs: Costs = {}
    cores = {}
    for size in sizes:
        try:
            cores[size] = open_core(size // (64 * KIB), 64 * KIB)
        except OutOfMemory as error:
            print(f"left out: {error}", file=sys.stderr)
    generator = random.Random(1)
    batches = key_batches(1 << 40, 64)
    sums = list(range(64))

    def fill(size: int, count: int) -> float:
        core, client = cores[size]
        keys = [next(batches) for _ in range(count)]
        # Of several sizes, so that what is evicted does not fit exactly.
        lengths = [[generator.randrange(1, 5) * 64 * KIB for _ in range(64)] for _ in range(count)]
        start = time.process_time()
        for names, some in zip(keys, lengths, strict=True):
            put(core, client, some, sums, names)
        return (time.process_time() - start) / count * 1e6

    def statistics_us(size: int) -> float:
        start = time.process_time()
        for _ in range(20):
            cores[size][0].statistics()
        return (time.process_time() - start) / 20 * 1e6

    for size in cores:
        fill(size, size // (64 * 64 * KIB))
    for _ in range(rounds):
        for size in generator.sample(list(cores), len(cores)):
            costs.setdefault("reserve and commit, 64 *", {}).setdefault(size, []).append(fill(size, calls))
            costs.setdefault("statistics *", {}).setdefault(size, []).append(statistics_us(size))
    for core, _ in cores.values():
        core.pool.close()
    return costs


def by_prefix(sizes: Sequence[int], rounds: int, calls: int) -> Costs:
    """Measure a key in longer and longer prefixes."""
    costs: Costs = {}
    with ExitStack() as until_end:
        served = Served(max(sizes), until_end)
        for number in range(rounds):
            for size in random.Random(number).sample(sizes, len(sizes)):
                cost = served.cost_us(partial(served.store.match_prefix, served.keys[:size]), max(2, calls // 10))
                costs.setdefault("match_prefix, a key", {}).setdefault(size, []).append(cost / size)
    return costs


def exponent(figures: Mapping[int, float]) -> float:
    """Return the slope of the line that fits the logarithms best."""
    return statistics.linear_regression([math.log(n) for n in figures], [math.log(c) for c in figures.values()]).slope


class Result(NamedTuple):
    """The median cost of one operation by the size of the work, and what fits it."""

    part: str
    name: str
    costs: Mapping[int, float]
    exponent: float

    @property
    def grows(self) -> bool:
        """Say whether it grows with the work, and nobody knows why."""
        return self.exponent >= MOST and not self.name.endswith("*")


def fitted(part: str, costs: Costs) -> list[Result]:
    """Return the results of a part."""
    results = []
    for name, figures in costs.items():
        medians = {size: statistics.median(some) for size, some in sorted(figures.items())}
        results.append(Result(part, name, medians, exponent(medians)))
    return results


def line(result: Result) -> str:
    """Return a result for a terminal."""
    listed = "  ".join(f"{_size(result.part, n)}: {cost:8.2f}" for n, cost in result.costs.items())
    return f"{result.part:8} {result.name:26} us  {listed}  exponent {result.exponent:6.3f}"


def markdown(results: Sequence[Result]) -> str:
    """Return the table of a part. An exponent that is too large is bold."""
    part, sizes = results[0].part, list(results[0].costs)
    shown = " | ".join(_size(part, size) for size in sizes)
    rows = [f"| {part}: microseconds | {shown} | exponent |", "|---" * (len(sizes) + 2) + "|"]
    for one in results:
        cells = [f"{one.costs[size]:.2f}" for size in sizes]
        slope = f"{one.exponent:.3f}"
        # A star of Markdown's own would be no star.
        name = one.name.replace("*", "\\*")
        rows.append(f"| {name} | {' | '.join(cells)} | {f'**{slope}**' if one.grows else slope} |")
    return "\n".join(rows)


def _size(part: str, number: int) -> str:
    return f"{number // GIB} GiB" if part == "pool" else f"{number:,}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(
        parser, quick="fewer rounds, and nothing larger than 10^5 keys", check="fail where an exponent is too large"
    )
    parser.add_argument("--only", choices=("keys", "clients", "pool", "prefix"))
    arguments = parser.parse_args()
    quick = arguments.quick
    rounds, calls = (5, 50) if quick else (15, 200)
    parts: dict[str, Callable[[], Costs]] = {
        "keys": lambda: by_keys([10**3, 10**4, 10**5, *([] if quick else [10**6])], rounds, calls),
        "clients": lambda: by_clients([1, 4, 16, 64], rounds, calls),
        "pool": lambda: by_pool([GIB, 4 * GIB, *([] if quick else [16 * GIB])], rounds, calls),
        "prefix": lambda: by_prefix([100, 1000, 10_000], rounds, calls),
    }
    results: list[Result] = []
    for part in [arguments.only] if arguments.only else parts:
        some = fitted(part, parts[part]())
        results += some
        if arguments.markdown:
            print(f"{markdown(some)}\n", flush=True)
        elif not arguments.json:
            print("\n".join(map(line, some)), flush=True)
    if arguments.json:
        found: dict[str, dict[str, dict[str, float]]] = {}
        for one in results:
            costs = {str(size): cost for size, cost in one.costs.items()}
            found.setdefault(one.part, {})[one.name] = {**costs, "exponent": one.exponent}
        print(json.dumps(found, indent=2))
    return int(arguments.check and any(one.grows for one in results))


if __name__ == "__main__":
    sys.exit(main())
