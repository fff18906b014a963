"""Shards beside one server, from one client to 64: requests or bytes a second, and the
processor time of the server for each.

    python bench/shards.py [--quick] [--json FILE [--resume]] [--limit SECONDS]
                           [--shards 1..16] [--clients 1 4 16 64] [--work requests bytes]

What it measures follows from the cores that this process may use, unless it is said:
up to 16 shards, at most one for a core, and up to 64 clients, at most four for a core.
It says what that leaves out. In a row, these take turns, in an order that changes:

- `shards`, and `one server` with as many clients, and `one client` of that server;
- for bytes also `raw sockets`: as many clients of a server that only sends and receives;
- with several NUMA nodes, in a row of its own, `near` and `far`: clients on the node of
  the server and on another.

Ratios are shards / each of the others, and far / near. The servers of a row run all the
time, and so do their clients, each a process that works when it is its turn. A step of
a client is three requests, as of an engine: it asks how much of a group of 64 keys is
there, reads 16 blocks of it, and puts them again; they have 4 KiB. For bytes it reads 16
blocks of 256 KiB, and puts them again. The keys of a group have a hash tag in common,
so that each request goes to one shard.

--settings also measures shards that spin, and shards without cores of their own, which
is what their defaults were chosen by.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from infinistore.blocking import open_store
from machine import Machine, this_machine
from recorded import Record, RecordError, add_record_arguments

KIB, MIB = 1024, 1024 * 1024
MOST_SHARDS = 16
MOST_CLIENTS = 64
CLIENTS_A_CORE = 4
"""More on a core wait for each other, and say nothing of a server."""
BLOCKS = 16


class Work(NamedTuple):
    """A step of a client: a lookup of all keys of a group, if there is one; a read of
    some blocks, and a put of them.
    """

    groups: int
    keys: int
    block_bytes: int
    requests: int

    @property
    def client_bytes(self) -> int:
        """Return what a client keeps in the store."""
        return self.groups * self.keys * self.block_bytes

    @property
    def step_bytes(self) -> int:
        """Return what a step moves."""
        return 2 * BLOCKS * self.block_bytes


WORK = {"requests": Work(32, 64, 4 * KIB, 3), "bytes": Work(4, BLOCKS, 256 * KIB, 2)}


class Row(NamedTuple):
    """What is compared: so many shards with so many clients. With nodes, the server is
    on the first, and the clients on the first and on the second.
    """

    work: str
    shards: int
    clients: int
    nodes: tuple[int, int] | None = None

    def __str__(self) -> str:
        shards, clients = _counted(self.shards, "shard"), _counted(self.clients, "client")
        nodes = f", nodes {self.nodes[0]} and {self.nodes[1]}" if self.nodes else ""
        return f"{self.work}, {shards}, {clients}{nodes}"


def choose_rows(
    machine: Machine,
    shards: Sequence[int] = (),
    clients: Sequence[int] = (),
    work: Sequence[str] = tuple(WORK),
) -> tuple[list[Row], list[str]]:
    """Return what to measure on a machine, and what that leaves out; counts that are
    given are not judged.
    """
    left_out = []
    doubled = [1, 2, 4, 8, MOST_SHARDS]
    chosen_shards = list(shards) or [count for count in doubled if count <= machine.cores]
    if larger := [count for count in doubled if not shards and count > machine.cores]:
        left_out.append(f"{', '.join(map(str, larger))} shards: more than the {machine.cores} cores")
    most = min(MOST_CLIENTS, 1 << (CLIENTS_A_CORE * machine.cores).bit_length() - 1)
    chosen_clients = list(clients) or sorted({1, *(most >> 2 * n for n in range(4) if most >> 2 * n)})
    if not clients and most < MOST_CLIENTS:
        left_out.append(f"{2 * most} to {MOST_CLIENTS} clients: more than {CLIENTS_A_CORE} for a core")
    rows = [Row(kind, n, count) for kind in work for n in chosen_shards for count in chosen_clients]
    nodes = sorted(machine.nodes, key=lambda name: (-len(machine.nodes[name]), int(name)))
    if len(nodes) > 1:
        pair = (int(nodes[0]), int(nodes[1]))
        half = max(1, len(machine.nodes[nodes[1]]) // 2)  # of a node's cores for shards, and a client for each other
        if len(nodes) > 2:
            left_out.append(
                f"near and far memory of nodes {', '.join(nodes[2:])}: those of {nodes[0]} and {nodes[1]} do"
            )
        rows += [Row(kind, n, half, pair) for kind in work for n in sorted({1, _power_of_two(half)})]
    else:
        left_out.append("near and far memory: this process has the cores of one NUMA node")
    return rows, left_out


def _power_of_two(most: int) -> int:
    return min(MOST_SHARDS, 1 << most.bit_length() - 1)


def counts(words: Sequence[str]) -> list[int]:
    """Return the numbers that were asked for: `1 2 4`, or `1..16`, which doubles.

    Raises:
        ValueError: it is no number, or less than 1.
    """
    found: set[int] = set()
    for word in words:
        first, dots, last = word.partition("..")
        number, end = int(first), int(last if dots else first)
        if not 1 <= number <= end:
            raise ValueError(f"{word} is no count")
        while number < end:
            found.add(number)
            number *= 2
        found.add(end)
    return sorted(found)


def client(url: str, number: int, kind: str) -> None:
    """Work for as long as each line of standard input says, and print how many steps
    that were, and how long they took.
    """
    with ExitStack() as until_end:
        step = (_raw_step if url.startswith("raw:") else _step)(url, number, WORK[kind], until_end)
        print("ready", flush=True)
        for line in sys.stdin:
            steps, start = 0, time.perf_counter()
            now, end = start, start + float(line)
            while now < end:
                step()
                steps += 1
                now = time.perf_counter()
            print(json.dumps([steps, now - start]), flush=True)


def _step(url: str, number: int, work: Work, until_end: ExitStack) -> Callable[[], None]:
    generator = random.Random(number)
    groups = [[f"{{{number}-{group}}}/{block}" for block in range(work.keys)] for group in range(work.groups)]
    block = generator.randbytes(work.block_bytes)
    buffers = [bytearray(work.block_bytes) for _ in range(BLOCKS)]
    store = until_end.enter_context(open_store(url))
    for keys in groups:
        store.put_many([(key, block) for key in keys])

    def step() -> None:
        keys = groups[generator.randrange(work.groups)]
        if work.requests == 3:
            assert store.match_prefix(keys) == work.keys
        store.get_many_into(list(zip(keys[:BLOCKS], buffers, strict=True)))
        store.put_many([(key, block) for key in keys[:BLOCKS]])

    return step


def _raw_step(url: str, number: int, work: Work, until_end: ExitStack) -> Callable[[], None]:
    from peers.clients import RawSockets  # numpy

    source, target = memoryview(random.Random(number).randbytes(BLOCKS * work.block_bytes)), bytearray(16 * MIB)
    peer = RawSockets(url.removeprefix("raw:"), source, memoryview(target))
    keys = [f"{number}/{block}" for block in range(BLOCKS)]
    get = peer.get(keys, work.block_bytes)
    put = peer.put(keys, [slice(n * work.block_bytes, (n + 1) * work.block_bytes) for n in range(BLOCKS)])

    def step() -> None:
        get()
        put()

    return step


class Turn(NamedTuple):
    """What clients did in their turn: steps a second, and the processor seconds of the
    server for a step.
    """

    steps_per_s: float
    server_s: float


class Running:
    """A server and its clients, which wait for their turn."""

    def __init__(self, processes: Sequence[int], clients: "list[subprocess.Popen[str]]") -> None:
        self._clients = clients
        files = [file for server in processes for file in Path(f"/proc/{server}/task").glob("*/children")]
        self._processes = [*map(str, processes), *(child for file in files for child in file.read_text().split())]

    def processor_s(self) -> float:
        """The processor time that the server has taken so far."""
        ticks = 0
        for process in self._processes:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def turn(self, count: int, seconds: float) -> Turn:
        """Let so many of the clients work."""
        before = self.processor_s()
        for process in self._clients[:count]:
            assert process.stdin is not None
            process.stdin.write(f"{seconds}\n")
            process.stdin.flush()
        done = [json.loads(_line(process)) for process in self._clients[:count]]
        taken = self.processor_s() - before
        return Turn(sum(steps / took for steps, took in done), taken / sum(steps for steps, _ in done))


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        sys.exit(f"a process ended: {' '.join(map(str, process.args))}")  # type: ignore[arg-type]
    return line


@contextmanager
def running(row: Row, path: str, *flags: str, cores: Sequence[int] = ()) -> Iterator[Running]:
    """Start a server, and clients that have filled it."""
    pool_mib = max(256, 2 * row.clients * WORK[row.work].client_bytes // MIB)
    command = [sys.executable, "-m", "infinistore", "--service-port", "0", "--manage-port", "off", "--json"]
    command += ["--prealloc-size", f"{pool_mib}MiB", "--minimal-allocate-size", "4", "--log-level", "error", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = json.loads(_line(server))["listening"][0].replace("tcp", path, 1)
            url += "?lookup_deadline_s=30&deadline_s=60"  # a busy machine is no lost shard
            with _clients(row, url, cores) as clients:
                yield Running([server.pid], clients)
        finally:
            server.terminate()


@contextmanager
def running_raw(row: Row) -> Iterator[Running | None]:
    """Start a server that only sends and receives, if there is what it needs."""
    try:
        from peers.systems import servers
        from peers.work import SOURCE_BYTES
    except ImportError:  # numpy
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="infinistore-shards-") as name:
        (Path(name) / "source").write_bytes(bytes(SOURCE_BYTES))
        with servers({"raw"}, Path(name)) as (raw, _), _clients(row, f"raw:{raw['raw'].address}", ()) as clients:
            yield Running(raw["raw"].processes, clients)


@contextmanager
def _clients(row: Row, url: str, cores: Sequence[int]) -> "Iterator[list[subprocess.Popen[str]]]":
    """Start clients, on these cores if there are any."""
    pipe = subprocess.PIPE
    on = ["taskset", "--cpu-list", ",".join(map(str, cores))] if cores else []
    with ExitStack() as processes:
        clients = []
        for number in range(row.clients):
            command = [*on, sys.executable, __file__, "--client", url, str(number), row.work]
            process = processes.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
            processes.callback(process.terminate)
            clients.append(process)
        for process in clients:
            _line(process)
        yield clients


Things = Mapping[str, tuple[Running, int]]
"""What takes turns in a row, with so many clients."""


def measure(things: Things, *, rounds: int, seconds: float) -> dict[str, list[Turn]]:
    """Give each its turn in each round. The first round does not count."""
    generator = random.Random(1)
    found: dict[str, list[Turn]] = {name: [] for name in things}
    for number in range(rounds + 1):
        for name in generator.sample(list(things), len(things)):
            of, count = things[name]
            turn = of.turn(count, seconds)
            if number:
                found[name].append(turn)
    return found


def figures(row: Row, turns: Mapping[str, Sequence[Turn]]) -> dict[str, Any]:
    """Return the figures of a row: medians of each thing, and the first by the others."""
    work = WORK[row.work]
    rates = {name: statistics.median(turn.steps_per_s for turn in some) for name, some in turns.items()}
    first, *others = rates
    found: dict[str, Any] = {
        name: {
            "requests_per_s": round(rate * work.requests),
            "bytes_per_s": round(rate * work.step_bytes),
            "server_us_per_request": round(
                1e6 * statistics.median(turn.server_s for turn in turns[name]) / work.requests, 1
            ),
        }
        for name, rate in rates.items()
    }
    return found | {"ratios": {f"{first} / {other}": round(rates[first] / rates[other], 3) for other in others}}


SPINNING = {
    "shards that do not spin": ("--spin-time", "0"),
    "shards that spin": ("--spin-time", "400"),
    "shards that share cores": ("--no-pin-cores",),
}


def started(row: Row, machine: Machine, path: str, until_end: ExitStack, *, settings: bool) -> Things:
    """Start what takes turns in a row, as it is until the end."""

    def start(*flags: str, cores: Sequence[int] = ()) -> tuple[Running, int]:
        return until_end.enter_context(running(row, path, *flags, cores=cores)), row.clients

    shards = ("--shards", str(row.shards)) if row.shards > 1 else ("--spin-time", "0")
    if row.nodes is not None:
        on = ("--numa-node", str(row.nodes[0]))
        near, far = (machine.nodes[str(node)] for node in row.nodes)
        return {"far": start(*shards, *on, cores=far), "near": start(*shards, *on, cores=near)}
    one = start("--spin-time", "0")
    things = {"one server": one}
    if row.shards > 1:
        things = {"shards": start(*shards), **things}
        if settings:
            things |= {name: start(*shards, *flags) for name, flags in SPINNING.items()}
    if row.clients > 1:
        things["one client"] = one[0], 1
    if row.work == "bytes" and (raw := until_end.enter_context(running_raw(row))) is not None:
        things["raw sockets"] = raw, row.clients
    return things


def read_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Return what to do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three short rounds")
    add_record_arguments(parser)
    parser.add_argument("--path", default="tcp", help="the scheme of the clients' URL")
    parser.add_argument("--shards", nargs="+", default=[], metavar="N", help="how many shards: 1 2 4, or 1..16")
    parser.add_argument("--clients", nargs="+", default=[], metavar="N", help="how many clients: 1 8, or 1..64")
    parser.add_argument("--work", nargs="+", choices=WORK, default=list(WORK), help="what clients do")
    parser.add_argument("--settings", action="store_true", help="also shards with other settings")
    parser.add_argument("--client", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    try:
        arguments.shards, arguments.clients = counts(arguments.shards), counts(arguments.clients)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def main() -> int:
    """Run, and print what was seen."""
    arguments = read_arguments(sys.argv[1:])
    if arguments.client:
        url, number, kind = arguments.client
        client(url, int(number), kind)
        return 0
    machine = this_machine()
    rows, left_out = choose_rows(machine, arguments.shards, arguments.clients, arguments.work)
    rounds, seconds = (3, 0.5) if arguments.quick else (7, 1.0)
    settings = {"path": arguments.path, "rounds": rounds, "seconds": seconds, "settings": arguments.settings}
    try:
        record = Record(
            arguments.json, settings, machine, list(map(str, rows)), left_out=left_out, resume=arguments.resume,
            limit_s=arguments.limit,
        )  # fmt: skip
    except RecordError as error:
        sys.exit(str(error))
    print(machine.describe())
    for text in left_out:
        print(f"left out: {text}")
    for row in rows:
        if str(row) not in record.missing:
            continue
        if not record.may_begin():
            break
        with ExitStack() as until_end:
            things = started(row, machine, arguments.path, until_end, settings=arguments.settings)
            found = figures(row, measure(things, rounds=rounds, seconds=seconds))
        record.add(str(row), found)
        print(row)
        for name in things:
            one = found[name]
            print(
                f"  {name:24} {one['requests_per_s']:8} requests/s {one['bytes_per_s'] / 1e9:7.2f} GB/s"
                f"  {one['server_us_per_request']:8.1f} us of the server for a request"
            )
        for name, ratio in found["ratios"].items():
            print(f"  {name}: {ratio:.2f}", flush=True)
    if record.missing:
        print(f"not measured for want of time: {len(record.missing)} rows; --resume goes on")
    return 0


def _counted(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number != 1)}"


if __name__ == "__main__":
    sys.exit(main())
