"""Two shards against one server, with eight clients in closed loops: requests a second,
and processor time of the server for each request.

    python bench/shards.py [--quick] [--json] [--path tcp] [--shards 2] [--settings]

The servers run all the time, and so do eight client processes for each; in each round,
the clients of one server at a time work for a second, in an order that changes. A step
of a client is three requests, as of an engine: it asks how much of a group of 64 keys
is there, reads 16 blocks of it, and puts them again. The keys of a group have a hash
tag in common, so that each request goes to one shard. Ratios are shards / one server.

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
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from infinistore.blocking import open_store

CLIENTS = 8
GROUPS = 32
KEYS = 64
BLOCKS = 16
BLOCK_BYTES = 4096
REQUESTS = 3
POOL = "256MiB"


def client(url: str, number: int) -> None:
    """Work for as long as each line of standard input says, and print how many requests
    that were.
    """
    generator = random.Random(number)
    groups = [[f"{{{number}-{group}}}/{block}" for block in range(KEYS)] for group in range(GROUPS)]
    block = generator.randbytes(BLOCK_BYTES)
    buffers = [bytearray(BLOCK_BYTES) for _ in range(BLOCKS)]
    with open_store(url) as store:
        for keys in groups:
            store.put_many([(key, block) for key in keys])
        print("ready", flush=True)
        for line in sys.stdin:
            steps, end = 0, time.perf_counter() + float(line)
            while time.perf_counter() < end:
                keys = groups[generator.randrange(GROUPS)]
                assert store.match_prefix(keys) == KEYS
                store.get_many_into(list(zip(keys[:BLOCKS], buffers, strict=True)))
                store.put_many([(key, block) for key in keys[:BLOCKS]])
                steps += 1
            print(steps * REQUESTS, flush=True)


class Running:
    """A server and its clients, which wait for their turn."""

    def __init__(self, server: "subprocess.Popen[str]", clients: "list[subprocess.Popen[str]]") -> None:
        self._clients = clients
        files = Path(f"/proc/{server.pid}/task").glob("*/children")
        self._processes = [str(server.pid), *(child for file in files for child in file.read_text().split())]

    def processor_s(self) -> float:
        """The processor time that the server has taken so far."""
        ticks = 0
        for process in self._processes:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def turn(self, seconds: float) -> tuple[float, float]:
        """Let the clients work. Return requests a second, and processor seconds a
        request.
        """
        before = self.processor_s()
        for process in self._clients:
            assert process.stdin is not None
            process.stdin.write(f"{seconds}\n")
            process.stdin.flush()
        requests = sum(int(_line(process)) for process in self._clients)
        return requests / seconds, (self.processor_s() - before) / requests


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        sys.exit(f"a process ended: {' '.join(map(str, process.args))}")  # type: ignore[arg-type]
    return line


@contextmanager
def running(path: str, *flags: str) -> Iterator[Running]:
    """Start a server, and clients that have filled it."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "infinistore", "--service-port", "0", "--manage-port", "off", "--json"]
    command += ["--prealloc-size", POOL, "--minimal-allocate-size", "4", "--log-level", "error", *flags]
    with ExitStack() as processes:
        server = processes.enter_context(subprocess.Popen(command, stdout=pipe, text=True))
        processes.callback(server.terminate)
        url = json.loads(_line(server))["listening"][0].replace("tcp", path, 1)
        url += "?lookup_deadline_s=30"  # a busy machine is no lost shard
        clients = []
        for number in range(CLIENTS):
            of_client = [sys.executable, __file__, "--client", url, str(number)]
            process = processes.enter_context(subprocess.Popen(of_client, stdin=pipe, stdout=pipe, text=True))
            processes.callback(process.terminate)
            clients.append(process)
        for process in clients:
            _line(process)
        yield Running(server, clients)


def measure(servers: dict[str, Running], *, rounds: int, seconds: float) -> dict[str, list[tuple[float, float]]]:
    """Give each server its turn in each round. The first round does not count."""
    generator = random.Random(1)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
    names = list(servers)
    for number in range(rounds + 1):
        generator.shuffle(names)
        for name in names:
            turn = servers[name].turn(seconds)
            if number:
                found[name].append(turn)
    return found


def main() -> None:
    """Run, and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a third of the rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--path", default="tcp", help="the scheme of the clients' URL")
    parser.add_argument("--shards", default=2, type=int, help="how many shards")
    parser.add_argument("--settings", action="store_true", help="also shards with other settings")
    parser.add_argument("--client", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        client(arguments.client[0], int(arguments.client[1]))
        return
    shards = ("--shards", str(arguments.shards))
    settings: dict[str, tuple[str, ...]] = {"one server": ("--spin-time", "0"), "shards": shards}
    if arguments.settings:
        settings |= {
            "shards that do not spin": (*shards, "--spin-time", "0"),
            "shards that spin": (*shards, "--spin-time", "400"),
            "shards that share cores": (*shards, "--no-pin-cores"),
            "one server that spins": ("--spin-time", "400"),
        }
    with ExitStack() as running_servers:
        servers = {
            name: running_servers.enter_context(running(arguments.path, *flags)) for name, flags in settings.items()
        }
        turns = measure(servers, rounds=5 if arguments.quick else 15, seconds=1.0)
    medians: Callable[[str, int], float] = lambda name, which: statistics.median(one[which] for one in turns[name])  # noqa: E731
    first = next(iter(settings))
    results = {
        name: {
            "requests_per_s": round(medians(name, 0)),
            "requests_ratio": round(medians(name, 0) / medians(first, 0), 3),
            "server_us_per_request": round(1e6 * medians(name, 1), 1),
            "server_us_ratio": round(medians(name, 1) / medians(first, 1), 3),
        }
        for name in settings
    }
    if arguments.json:
        print(json.dumps(results))
        return
    print(f"{CLIENTS} clients, {len(os.sched_getaffinity(0))} cores, over {arguments.path}; medians")
    for name, result in results.items():
        print(
            f"  {name:24} {result['requests_per_s']:7} requests/s ({result['requests_ratio']:.2f})"
            f"  {result['server_us_per_request']:6.1f} us of the server each ({result['server_us_ratio']:.2f})"
        )


if __name__ == "__main__":
    main()
