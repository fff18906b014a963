"""What spinning is worth: clients in closed loops, with spinning off, on and adaptive,
on an idle machine and on a busy one.

    python bench/waiting.py [--quick] [--json | --markdown] [--check] [--clients 1,2]
                            [--machine idle] [--path tcp] [--operation exists]

Three servers run all the time, one for each setting, and eight client processes, which
have a store open at each of them by each path. In each round, the settings take turns
of 80 ms after 30 ms that do not count, in an order that changes. On a busy machine, a
process for each core computes all the time, at the priority of the others or at the
lowest one.

The time of an operation is the time of the turn by the operations of all clients
together. Ratios are the times of adaptive / the better of off and on, of the same
round; beside their median stands its 95 % interval. A row is marked if the whole
interval is above 1.10, and with `--check` the exit status is 1 if one is. In brackets
stands the processor time of an operation, of the server and all clients, which shows on
a noisy machine, too, who spins in vain.
"""

import argparse
import json
import mmap
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from math import comb
from pathlib import Path
from typing import Any

from infinistore.blocking import BlockingStore, open_store
from rounds import add_common_arguments

KIB = 1024
SETTINGS = {"off": "off", "on": "400", "adaptive": "adaptive"}
CLIENTS = (1, 2, 4, 8)
MACHINES = ("idle", "busy", "busy, niced")
PATHS = ("tcp", "shm")
OPERATIONS = ("exists", "put 4 KiB", "get 4 KiB", "get 64 KiB", "put and get 64 x 64 KiB")
TURN_S, WARM_UP_S = 0.08, 0.03
BOUND = 1.10
MARKDOWN_HEAD = """\
| machine | path | operation | clients | off, us | on, us | adaptive, us | adaptive / the better one |
|---|---|---|---|---|---|---|---|"""


def operations(store: BlockingStore, number: int) -> dict[str, Callable[[], object]]:
    """Return what a client does with a store; what it reads is there."""
    memory = memoryview(mmap.mmap(-1, 128 * 64 * KIB))
    memory[:] = random.Random(number).randbytes(len(memory))
    views = [memory[start : start + 64 * KIB] for start in range(0, len(memory), 64 * KIB)]
    keys = [f"{number}/{index}" for index in range(64)]
    small, puts = views[0][: 4 * KIB], list(zip(keys, views[:64], strict=True))
    gets = list(zip(keys, views[64:], strict=True))
    store.put("small", small)
    store.put_many(puts)

    def batch() -> None:
        store.put_many(puts)
        store.get_many_into(gets)

    calls = (
        lambda: store.exists(keys[0]),
        lambda: store.put(f"{number}/put", small),
        lambda: store.get_into("small", small),
        lambda: store.get_into(keys[0], views[64]),
        batch,
    )
    return dict(zip(OPERATIONS, calls, strict=True))


def client(urls: dict[str, str], number: int) -> None:
    """Take the turns that standard input names, and print the operations of each."""
    with ExitStack() as stack:
        todo = {name: operations(stack.enter_context(open_store(url)), number) for name, url in urls.items()}
        print("ready", flush=True)
        for line in sys.stdin:
            turn = json.loads(line)
            call, start = todo[turn["store"]][turn["operation"]], turn["start"]
            time.sleep(max(0.0, start - time.monotonic()))
            begin, end = start + WARM_UP_S, start + WARM_UP_S + TURN_S
            count, processor_s = 0, time.process_time()
            while (now := time.monotonic()) < end:
                call()
                if now >= begin:
                    count += 1
                else:
                    processor_s = time.process_time()
            # What was under way at the end counts as far as the turn had come.
            late = time.monotonic() - end
            done = count * TURN_S / (TURN_S + late)
            print(json.dumps([done, (time.process_time() - processor_s) / max(count, 1)]), flush=True)


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        sys.exit(f"a process ended: {' '.join(map(str, process.args))}")  # type: ignore[arg-type]
    return line


@contextmanager
def running(paths: Sequence[str], most: int) -> "Iterator[tuple[list[subprocess.Popen[str]], dict[str, int]]]":
    """Start the servers and clients; give the clients, and the servers' process ids."""
    pipe = subprocess.PIPE
    urls: dict[str, str] = {}
    servers: dict[str, int] = {}
    with ExitStack() as processes:
        for name, setting in SETTINGS.items():
            command = [sys.executable, "-m", "infinistore", "--service-port", "0", "--manage-port", "off", "--json"]
            command += ["--prealloc-size", "128MiB", "--minimal-allocate-size", "4", "--log-level", "error"]
            command += ["--spin-time", setting]
            server = processes.enter_context(subprocess.Popen(command, stdout=pipe, text=True))
            processes.callback(server.terminate)
            servers[name] = server.pid
            listening = json.loads(_line(server))["listening"]
            for path in paths:
                url = listening[0] if path == "tcp" else listening[1].replace("unix", path, 1)
                urls[f"{name} {path}"] = f"{url}?spin_us={setting}"
        clients = []
        for number in range(most):
            of_client = [sys.executable, __file__, "--client", json.dumps(urls), str(number)]
            process = processes.enter_context(subprocess.Popen(of_client, stdin=pipe, stdout=pipe, text=True))
            processes.callback(process.terminate)
            clients.append(process)
        for process in clients:
            _line(process)
        yield clients, servers


@contextmanager
def load(machine: str) -> Iterator[None]:
    """Keep each core busy with something else, or not."""
    with ExitStack() as processes:
        for _ in os.sched_getaffinity(0) if machine != "idle" else ():
            nice = 19 if "niced" in machine else 0
            code = f"import os; os.nice({nice})\nwhile True: pass"
            process = processes.enter_context(subprocess.Popen([sys.executable, "-c", code]))
            processes.callback(process.kill)
        if machine != "idle":
            time.sleep(0.3)
        yield


def processor_s(process: int) -> float:
    """Return what the main thread of a process has taken so far, in seconds."""
    return int(Path(f"/proc/{process}/schedstat").read_text().split()[0]) * 1e-9


def take_turn(
    clients: "Sequence[subprocess.Popen[str]]", server: int, store: str, operation: str
) -> tuple[float, float]:
    """Let these clients work. Return the time of an operation and its processor time,
    in seconds.
    """
    start = time.monotonic() + 0.01
    for process in clients:
        assert process.stdin is not None
        process.stdin.write(json.dumps({"store": store, "operation": operation, "start": start}) + "\n")
        process.stdin.flush()
    time.sleep(max(0.0, start + WARM_UP_S - time.monotonic()))
    before = processor_s(server)
    time.sleep(max(0.0, start + WARM_UP_S + TURN_S - time.monotonic()))
    of_server = processor_s(server) - before
    told = [json.loads(_line(process)) for process in clients]
    done = max(sum(count for count, _ in told), 0.1)
    return TURN_S / done, of_server / done + sum(count * each_s for count, each_s in told) / done


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, and the order statistics between which it is in 95 %."""
    ordered, count = sorted(values), len(values)
    cut, outside = 0, 2 * 0.5**count
    while outside + 2 * comb(count, cut + 1) * 0.5**count <= 0.05:
        cut += 1
        outside += 2 * comb(count, cut) * 0.5**count
    return statistics.median(ordered), ordered[cut], ordered[count - 1 - cut]


def measure(arguments: argparse.Namespace, counts: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield row after row."""
    paths, operations = arguments.path or PATHS, arguments.operation or OPERATIONS
    generator = random.Random(1)
    with running(paths, max(counts)) as (clients, servers):
        for machine in arguments.machine or MACHINES:
            with load(machine):
                for path, operation, count in product(paths, operations, counts):
                    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in SETTINGS}
                    for _ in range(7 if arguments.quick else 15):
                        for name in generator.sample(list(SETTINGS), len(SETTINGS)):
                            turns[name].append(take_turn(clients[:count], servers[name], f"{name} {path}", operation))
                    what = {"machine": machine, "path": path, "operation": operation, "clients": count}
                    yield summary(turns) | what


def main() -> int:
    """Run, and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0] if __doc__ else None)
    add_common_arguments(parser, quick="7 rounds instead of 15", check="fail if a row is marked")
    parser.add_argument("--clients", help="how many, such as 1,2")
    parser.add_argument("--machine", action="append", choices=MACHINES, help="may be repeated")
    parser.add_argument("--path", action="append", choices=PATHS, help="may be repeated")
    parser.add_argument("--operation", action="append", choices=OPERATIONS, help="may be repeated")
    parser.add_argument("--client", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        client(json.loads(arguments.client[0]), int(arguments.client[1]))
        return 0
    counts = [int(count) for count in arguments.clients.split(",")] if arguments.clients else CLIENTS
    if arguments.markdown:
        print(MARKDOWN_HEAD)
    results = []
    for result in measure(arguments, counts):
        results.append(result)
        if not arguments.json:
            print(markdown_row(result) if arguments.markdown else line(result), flush=True)
    if arguments.json:
        print(json.dumps(results))
    return int(arguments.check and any(map(is_worse, results)))


def summary(turns: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Return the medians, in microseconds, and the ratios."""
    times = {name: [one for one, _ in of_one] for name, of_one in turns.items()}
    medians = {name: statistics.median(of_one) for name, of_one in times.items()}
    best = min(("off", "on"), key=medians.__getitem__)
    ratio = interval([one / other for one, other in zip(times["adaptive"], times[best], strict=True)])
    return {
        **{f"{name}_us": round(1e6 * median, 1) for name, median in medians.items()},
        **{f"{name}_cpu_us": round(1e6 * statistics.median(one for _, one in turns[name]), 1) for name in turns},
        "best": best,
        "ratio": [round(one, 3) for one in ratio],
    }


def is_worse(result: Mapping[str, Any]) -> bool:
    """Say whether adaptive is certainly worse than the better of the others."""
    return bool(result["ratio"][1] > BOUND)


def line(result: Mapping[str, Any]) -> str:
    """Return a row for a terminal."""
    median, low, high = result["ratio"]
    measured = "  ".join(f"{name} {result[f'{name}_us']:7.1f} ({result[f'{name}_cpu_us']:6.1f})" for name in SETTINGS)
    return (
        f"{result['machine']:12} {result['path']:4} {result['operation']:24} {result['clients']} clients: {measured} us"
        f"  {median:5.2f} [{low:.2f}, {high:.2f}] of {result['best']}{'  WORSE' if is_worse(result) else ''}"
    )


def markdown_row(result: Mapping[str, Any]) -> str:
    """Return a row of a table. What is worse is bold."""
    median, low, high = result["ratio"]
    what = [result["machine"], result["path"], result["operation"], str(result["clients"])]
    times = [f"{result[f'{name}_us']:.1f} ({result[f'{name}_cpu_us']:.1f})" for name in SETTINGS]
    ratio = f"{median:.2f} ({low:.2f} to {high:.2f}) of {result['best']}"
    return f"| {' | '.join([*what, *times])} | {f'**{ratio}: WORSE**' if is_worse(result) else ratio} |"


if __name__ == "__main__":
    sys.exit(main())
