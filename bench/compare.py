"""This store, and those that people would take instead, in one run.

    make compare COMPARE_ARGS="--quick"
    python bench/compare.py [--quick] [--systems TCP Redis] [--shapes "64 x 64 KiB"]
                            [--operations put get] [--clients 1..64] [--rounds 3]
                            [--shards 1..16] [--numa-node 0] [--resume] [--limit SECONDS]

Redis (redis-py with hiredis), memcached (pymemcache and pylibmc), Mooncake's store with
its zero-copy calls, the original InfiniStore where there is an RDMA device, without
which its server does not start, and as limits raw sockets and memcpy. Each server has
as much memory, each client is a process, all are on this machine. In each round all
stores take turns, in an order that is drawn, so that a neighbour's load falls on all of
them; what is shown are the medians of the rounds. A client calls as fast as it can, one call after
the other. It writes new keys, from memory larger than the last-level cache, and reads
blocks in an order of its own; a batch that was read is compared byte by byte before it
is measured.

How many clients there are at most, and how many shards of this store, follows from the
cores and the memory of the machine, unless it is said; what that leaves out is named.
--numa-node keeps servers and clients on one node.

Results are in `bench/out/compare.json` (`--json`), which is written as each row ends,
and `compare.md` (`--out`): also why a store is not there, and what is wanted of this
one beside what came out. --resume measures what the file lacks. With `--check` the exit
status is 1 if something that is wanted was lost, or nothing of it was measured.
`--plots FOLDER` draws the results, too.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from infinistore.errors import ConfigError
from infinistore.host import bind_process
from machine import Machine, this_machine
from peers.report import Run, markdown, versions
from peers.systems import SHARDS, SYSTEMS, Server, System, process_cpu_s, servers
from peers.wanted import reached, wanted
from peers.work import (
    KIB,
    MIB,
    OPERATIONS,
    POOL_BYTES,
    SHAPES,
    SOURCE_BYTES,
    WRITTEN_BYTES,
    Result,
    Shape,
    fill_source,
    read_results,
)
from recorded import Record, RecordError, add_record_arguments
from shards import counts

BENCH = Path(__file__).parent
_BEFORE_S = 0.02
"""From telling clients when to begin until then."""
_TARGET_BYTES = 64 * MIB
_CALL_S = 60.0
_BLOCKS_OF_A_SHARD = 64
"""Fewer would not spread evenly."""
_CLIENTS_A_CORE = 4
_CLIENTS_A_GIB = 0.5
"""There are so many of each store, with 16 MiB and more to read into."""


class Clients:
    """The processes that are clients of one store."""

    def __init__(self, system: System, server: Server, source: Path, until_end: ExitStack) -> None:
        self._system = system
        self.server = server
        self._source = source
        self._until_end = until_end
        self._workers: list[subprocess.Popen[str]] = []

    @property
    def count(self) -> int:
        """Return how many processes there are."""
        return len(self._workers)

    def start(self, count: int) -> None:
        """Start processes until there are so many, all at once."""
        began = len(self._workers)
        for number in range(began, count):
            target_bytes = max(16 * MIB, _TARGET_BYTES // (1 << number.bit_length()))
            command = [self._system.python, str(BENCH / "peers" / "worker.py"), self._system.client]
            command += [self._system.address(self.server.address), str(self._source), str(target_bytes), str(number)]
            self._workers.append(self._until_end.enter_context(_worker(command)))
        for worker in self._workers[began:]:
            self._answer(worker)

    def ask(self, count: int, **request: Any) -> list[dict[str, Any]]:
        """Ask the first of them the same; return their answers."""
        for worker in self._workers[:count]:
            _tell(worker, request)
        return [self._answer(worker) for worker in self._workers[:count]]

    def share(self, count: int, **request: Any) -> None:
        """Have the first of them do a part each."""
        for number, worker in enumerate(self._workers[:count]):
            _tell(worker, request | {"part": [number, count]})
        for worker in self._workers[:count]:
            self._answer(worker)

    def server_cpu_s(self) -> float:
        """Return the processor time that the server's processes have used."""
        return sum(process_cpu_s(process) for process in self.server.processes)

    def server_bytes(self) -> int:
        """Return the memory that the server's processes have, shared memory included."""
        return sum(_resident_bytes(process) for process in self.server.processes)

    def _answer(self, worker: "subprocess.Popen[str]") -> dict[str, Any]:
        assert worker.stdout is not None
        for line in worker.stdout:
            if line.startswith("{"):  # libraries write to standard output, too
                answer: dict[str, Any] = json.loads(line)
                if "error" in answer:
                    raise Failed(answer["error"])
                return answer
        raise Failed("its client ended")


class Failed(Exception):
    """A store does not do what it is asked to; the text is its answer."""


class Cell(NamedTuple):
    """What is measured of each store."""

    operation: str
    shape: Shape
    clients: int

    def __str__(self) -> str:
        return f"{self.operation}, {self.shape}, {self.clients} client{'s' * (self.clients != 1)}"

    def concerns(self, system: System) -> bool:
        """Say whether this store does that."""
        return (
            self.operation in system.operations
            and (self.shape.blocks > 1 or not system.batches_only)
            and self.clients <= system.most_clients
            # Else a put of each client would have to evict, or the blocks of one shard.
            and (self.operation not in ("put", "mix") or self.clients * self.shape.batch_bytes <= WRITTEN_BYTES)
            and (system.shards == 1 or self.shape.size <= POOL_BYTES // system.shards // _BLOCKS_OF_A_SHARD)
        )


def measure(cell: Cell, clients: Clients, seconds: float) -> dict[str, Any]:
    """Run one cell once; return its figures."""
    clients.ask(cell.clients, do="prepare", op=cell.operation, shape=list(cell.shape), clients=cell.clients)
    server = clients.server_cpu_s()
    answers = clients.ask(cell.clients, do="run", at=time.monotonic() + _BEFORE_S, seconds=seconds)
    server = clients.server_cpu_s() - server
    calls = sum(answer["calls"] for answer in answers)
    times = sorted(time_ns for answer in answers for time_ns in answer["times"])
    moved = calls * cell.shape.batch_bytes
    if cell.operation in ("put", "mix"):
        clients.ask(cell.clients, do="forget")
    return {
        "calls_per_s": sum(answer["calls"] / answer["seconds"] for answer in answers),
        "p50_us": times[len(times) // 2] / 1000,
        "p99_us": times[min(len(times) - 1, len(times) * 99 // 100)] / 1000,
        "client_cpu_s_per_gb": sum(answer["cpu"] for answer in answers) / moved * 1e9,
        "server_cpu_s_per_gb": server / moved * 1e9,
    }


def cells(arguments: argparse.Namespace) -> Iterator[tuple[Shape, list[Cell]]]:
    """Give what is to be measured, shape by shape: each store has the blocks of one."""
    for shape in arguments.shapes:
        operations = [one for one in arguments.operations if one != "exists" or shape == SHAPES[0]]
        yield shape, [Cell(one, shape, count) for one in operations for count in arguments.clients]


def run(
    arguments: argparse.Namespace,
    clients: Mapping[str, Clients],
    record: Record,
    out: Console,
    failures: dict[str, str],
) -> None:
    """Measure what the record lacks, and show how far it has come."""
    generator = random.Random(1)
    systems = {system.name: system for system in SYSTEMS if system.name in clients}
    missing = set(record.missing)
    planned = [(shape, [cell for cell in some if str(cell) in missing]) for shape, some in cells(arguments)]
    columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=out, transient=True) as progress:
        task = progress.add_task("", total=sum(len(some) for _, some in planned) * arguments.rounds)
        for shape, some in planned:
            if not some or not record.may_begin():
                continue
            progress.update(task, description=f"{shape}: blocks to read")
            _fill(shape, clients, failures)
            for cell in some:
                if not record.may_begin():
                    break
                progress.update(task, description=str(cell))
                figures: dict[str, list[dict[str, Any]]] = {}
                for _ in range(arguments.rounds):
                    names = [name for name, system in systems.items() if cell.concerns(system)]
                    for name in generator.sample(names, len(names)):
                        if f"{name}: {shape}" not in failures:
                            try:
                                measured = measure(cell, clients[name], arguments.seconds)
                            except Failed as error:
                                failures[f"{name}: {shape}"] = f"{cell.operation}, {cell.clients} clients: {error}"
                            else:
                                figures.setdefault(name, []).append(measured)
                    progress.advance(task)
                results = [_median(cell, systems[name], runs) for name, runs in figures.items()]
                record.found["failures"] = record.found.get("failures", {}) | failures
                record.add(str(cell), {"results": [result._asdict() for result in results]})
            _clear(shape, clients, failures)


def _fill(shape: Shape, clients: Mapping[str, Clients], failures: dict[str, str]) -> None:
    """Put what is to be read, and have every client read it once. Those of one server
    share it.
    """
    by_server: dict[int, list[str]] = {}
    for name, some in clients.items():
        by_server.setdefault(id(some.server) if some.server.address else id(some), []).append(name)
    for names in by_server.values():
        for number, name in enumerate(names):
            try:
                if not number:
                    clients[name].share(1, do="fill", shape=list(shape))
                clients[name].ask(clients[name].count, do="check", shape=list(shape))
            except Failed as error:
                failures[f"{name}: {shape}"] = f"blocks to read: {error}"


def _clear(shape: Shape, clients: Mapping[str, Clients], failures: dict[str, str]) -> None:
    for name, some in clients.items():
        try:
            some.share(1, do="clear", shape=list(shape))
        except Failed as error:
            failures.setdefault(f"{name}: {shape}", f"removing blocks: {error}")


def _median(cell: Cell, system: System, runs: Sequence[Mapping[str, float]]) -> Result:
    figures = {figure: statistics.median(run[figure] for run in runs) for figure in runs[0]}
    return Result(cell.operation, cell.shape, cell.clients, system.name, system.ours, system.limit, figures)


def memory(clients: Mapping[str, Clients]) -> dict[str, int]:
    """Put the same blocks into each server; return the bytes of memory that it has
    then beside them, or beside the pool where it has taken that from the start.
    """
    shape = Shape(64, 64 * KIB)
    beside: dict[str, int] = {}
    for name, some in clients.items():
        if some.server.processes and not any(clients[other].server is some.server for other in beside):
            some.share(1, do="fill", shape=list(shape))
            beside[name] = some.server_bytes() - max(some.server.pool_bytes, shape.stored * shape.size)
            some.share(1, do="clear", shape=list(shape))
    return beside


@contextmanager
def _worker(command: list[str]) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as worker:
        try:
            yield worker
        finally:
            worker.kill()


def _tell(worker: "subprocess.Popen[str]", request: Mapping[str, Any]) -> None:
    assert worker.stdin is not None
    try:
        worker.stdin.write(json.dumps(request) + "\n")
        worker.stdin.flush()
    except BrokenPipeError:
        raise Failed("its client ended") from None


def _resident_bytes(process: int) -> int:
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * 4096


def read_arguments(words: Sequence[str], machine: Machine) -> argparse.Namespace:
    """Return what to do; shapes are looked up, and what is not said is filled in, and
    what that leaves out.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = {str(shape): shape for shape in SHAPES}
    parser.add_argument("--quick", action="store_true", help="three shapes, 1, 4, 16 and 64 clients, short runs")
    parser.add_argument(
        "--systems", nargs="+", choices=[one.name for one in SYSTEMS], metavar="NAME", help="only these"
    )
    parser.add_argument("--shapes", nargs="+", choices=names, metavar="SHAPE", help=f"of {', '.join(names)}")
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    parser.add_argument("--clients", nargs="+", default=[], metavar="N", help="how many at a time: 1 8, or 1..64")
    parser.add_argument(
        "--shards", nargs="+", default=[], metavar="N", help=f"of {SHARDS}, also 1..16; one server is always there"
    )
    parser.add_argument("--numa-node", type=int, metavar="N", help="run everything on this node")
    add_record_arguments(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, help="how long one run of a cell is (0.3)")
    parser.add_argument("--check", action="store_true", help="fail where less came out than is wanted")
    parser.add_argument("--out", type=Path, default=BENCH / "out", metavar="FOLDER", help="where results go")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw SVGs into this folder")
    arguments = parser.parse_args(words)
    quick = arguments.quick
    some = arguments.shapes or (["4 KiB", "64 KiB", "64 x 64 KiB"] if quick else list(names))
    arguments.shapes = [names[name] for name in some]
    try:
        arguments.clients, arguments.shards = counts(arguments.clients), counts(arguments.shards)
    except ValueError as error:
        parser.error(str(error))
    arguments.left_out = []
    if not arguments.clients:
        most = max(1, min(_CLIENTS_A_CORE * machine.cores, int(_CLIENTS_A_GIB * machine.memory_gib) or 1))
        wanted_clients = [1, 4, 16, 64] if quick else [1, 2, 4, 8, 16, 32, 64]
        arguments.clients = [count for count in wanted_clients if count <= most]
        if more := [str(count) for count in wanted_clients if count > most]:
            arguments.left_out.append(f"{', '.join(more)} clients: too many for {machine.describe()}")
    if not arguments.shards and not arguments.systems:
        arguments.shards = [count for count in SHARDS if 2 * count <= machine.cores][-1:]  # the others are clients'
        if not arguments.shards:
            arguments.left_out.append(f"shards: there are {machine.cores} cores for them and their clients")
    if unknown := set(arguments.shards) - {1, *SHARDS}:
        parser.error(f"--shards can be 1, {', '.join(map(str, SHARDS))}, and not {min(unknown)}")
    if len(machine.nodes) > 1:
        arguments.left_out.append("the memory of each NUMA node by itself: --numa-node")
    arguments.seconds = arguments.seconds or (0.15 if quick else 0.3)
    arguments.json = arguments.json or arguments.out / "compare.json"
    return arguments


def chosen_systems(arguments: argparse.Namespace) -> list[System]:
    """Return the stores to measure: those that are named, and all without."""
    return [
        system
        for system in SYSTEMS
        if (system.name in arguments.systems if arguments.systems else system.shards == 1)
        or system.shards in set(arguments.shards) - {1}
    ]


def main() -> int:
    arguments = read_arguments(sys.argv[1:], this_machine())
    if arguments.numa_node is not None:
        try:
            bind_process(arguments.numa_node)  # and what it starts
        except ConfigError as error:
            sys.exit(str(error))
    machine, out = this_machine(), Console()
    chosen = chosen_systems(arguments)
    settings = {"rounds": arguments.rounds, "seconds": arguments.seconds, "systems": [system.name for system in chosen]}
    planned = [str(cell) for _, some in cells(arguments) for cell in some]
    try:
        record = Record(
            arguments.json, settings, machine, planned, left_out=arguments.left_out, resume=arguments.resume,
            limit_s=arguments.limit,
        )  # fmt: skip
    except RecordError as error:
        sys.exit(str(error))
    # What failed with blocks of one shape counts as long as those rows do.
    earlier = record.found.get("failures", {})
    failures = {} if record.missing else dict(earlier)
    record.found["failures"] = {what: why for what, why in earlier.items() if ": " in what}
    began = time.monotonic()
    if record.missing:
        measure_all(arguments, chosen, record, out, failures)
    record.found["failures"] = failures = record.found.get("failures", {}) | failures
    results = read_results(record.rows)
    about = Run(machine.describe(), versions(), " ".join(sys.argv[1:]), round(time.monotonic() - began))
    left = list(arguments.left_out)
    if record.missing:
        left.append(f"for want of time: {len(record.missing)} rows; --resume goes on")
    text = markdown(about, results, record.found["memory"], failures, left)
    checked = wanted(results)
    record.found["wanted"] = [
        {"wanted": one.wanted, "measured": [part._asdict() for part in one.measured], "verdict": one.verdict}
        for one in checked
    ]
    record.found["versions"] = about.versions
    record.write()
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "compare.md").write_text(text, encoding="utf-8")
    out.print(text, markup=False, highlight=False, soft_wrap=True)
    if arguments.plots:
        from peers.plots import draw  # matplotlib

        draw(results, arguments.plots)
    return int(arguments.check and not reached(checked))


def measure_all(
    arguments: argparse.Namespace, chosen: Sequence[System], record: Record, out: Console, failures: dict[str, str]
) -> None:
    """Start stores and clients, and measure what the record lacks."""
    with tempfile.TemporaryDirectory(prefix="infinistore-compare-") as name, ExitStack() as until_end:
        folder = Path(name)
        source = folder / "source"
        content = bytearray(SOURCE_BYTES)
        fill_source(content)
        source.write_bytes(content)
        running, missing = until_end.enter_context(servers({system.server for system in chosen}, folder))
        clients: dict[str, Clients] = {}
        for system in chosen:
            if system.server in missing:
                failures[system.name] = missing[system.server]
                continue
            starting = Clients(system, running[system.server], source, until_end)
            try:
                starting.start(min(max(arguments.clients), system.most_clients))
                clients[system.name] = starting
            except Failed as error:
                failures[system.name] = f"its client does not start: {error}"
        if "memory" not in record.found:
            record.found["memory"] = memory(clients)
        run(arguments, clients, record, out, failures)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
