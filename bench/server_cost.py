"""What a server takes for a small request over TCP, against a bare Trio server that
receives and sends as many bytes.

    python bench/server_cost.py [--quick] [--json | --markdown] [--check]

Both servers are processes of their own, on loopback, and none spins. Each gets the same
number of calls from one client at a time, in an order that changes. What is compared is
the processor time of their threads as the kernel counts it, in user and kernel mode
together; waiting does not count, so that other load matters less. Ratios are those of
each round, server / bare; beside their median stand their quartiles. With `--check` the
exit status is 1 if a median is above 2.0.

Each is asked again at once, and then 300 us after each answer. The client of the bare
server does next to nothing, so that its next request comes before that server sleeps,
which halves what it takes; after a pause, both servers have gone to sleep.
"""

import argparse
import itertools
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from infinistore.blocking import open_store
from infinistore.transports.sockets.blocking_streams import BlockingSocketStream
from rounds import add_common_arguments

KIB = 1024
CALLS = 300
MOST = 2.0
PAUSES_S = {"at once": 0.0, "after 300 us": 300e-6}
_BARE_SERVER = """
import sys, trio
async def serve(stream):
    received, sent = [int(number) for number in (await stream.receive_some(64)).split()]
    await stream.send_all(b"x")
    answer = bytes(sent)
    while True:
        left = received
        while left:
            data = await stream.receive_some(65536)
            if not data:
                return
            left -= len(data)
        await stream.send_all(answer)
async def main():
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    print(listeners[0].socket.getsockname()[1], flush=True)
    await trio.serve_listeners(serve, listeners)
trio.run(main)
"""


class Bare:
    """A client of the bare server, which knows how many bytes go each way."""

    def __init__(self, port: int, sends: int, receives: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock.sendall(f"{sends} {receives}".encode())
        assert self._sock.recv(1) == b"x"
        self._request = bytes(sends)
        self._reply = bytearray(receives)

    def call(self) -> None:
        """Send and receive once."""
        self._sock.sendall(self._request)
        self._sock.recv_into(self._reply, len(self._reply), socket.MSG_WAITALL)

    def close(self) -> None:
        """Hang up."""
        self._sock.close()


@contextmanager
def started(command: list[str]) -> "Iterator[tuple[int, str]]":
    """Start a server; give its process and the first line that it prints."""
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server.pid, server.stdout.readline()
        finally:
            server.terminate()


def moved_bytes(call: Callable[[], object]) -> tuple[int, int]:
    """Return how many bytes a call of a store sends, and how many it receives."""
    sent = received = 0
    send, receive = BlockingSocketStream.send_all, BlockingSocketStream.receive_into

    def sending(stream: BlockingSocketStream, views: "list[memoryview]") -> None:
        nonlocal sent
        sent += sum(map(len, views))
        send(stream, views)

    def receiving(stream: BlockingSocketStream, views: "list[memoryview]") -> int:
        nonlocal received
        count = receive(stream, views)
        received += count
        return count

    with (
        mock.patch.object(BlockingSocketStream, "send_all", sending),
        mock.patch.object(BlockingSocketStream, "receive_into", receiving),
    ):
        call()
    return sent, received


def compute(seconds: float) -> None:
    """Keep this core busy for so long."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def processor_s(process: int) -> float:
    """Return what all threads of a process have taken so far, in seconds."""
    files = Path(f"/proc/{process}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) * 1e-9


def measure(rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of a request, and its medians and ratios."""
    store_server = ["-m", "infinistore", "--service-port", "0", "--manage-port", "off", "--json"]
    store_server += ["--unix-socket", "off", "--prealloc-size", "64MiB", "--log-level", "error", "--spin-time", "off"]
    generator = random.Random(1)
    with ExitStack() as stack:
        process, line = stack.enter_context(started(store_server))
        bare_process, port = stack.enter_context(started(["-c", _BARE_SERVER]))
        store = stack.enter_context(open_store(json.loads(line)["listening"][0], spin_us="off"))
        value, buffer = bytes(4 * KIB), bytearray(4 * KIB)
        store.put("key", value)
        calls: dict[str, Callable[[], object]] = {
            "exists": lambda: store.exists("key"),
            "get 4 KiB": lambda: store.get_into("key", buffer),
            "put 4 KiB": lambda: store.put("key", value),
        }
        for (name, call), (when, pause_s) in itertools.product(calls.items(), PAUSES_S.items()):
            bare = Bare(int(port), *moved_bytes(call))
            sides = {"server": (call, process), "bare": (bare.call, bare_process)}
            taken: dict[str, list[float]] = {side: [] for side in sides}
            for number in range(2 + rounds):
                for side in generator.sample(list(sides), 2):
                    one, of_process = sides[side]
                    before = processor_s(of_process)
                    for _ in range(CALLS):
                        one()
                        if pause_s:
                            compute(pause_s)
                    if number >= 2:
                        taken[side].append((processor_s(of_process) - before) / CALLS)
            bare.close()
            ratios = [one / other for one, other in zip(taken["server"], taken["bare"], strict=True)]
            medians = {side: round(1e6 * statistics.median(times), 1) for side, times in taken.items()}
            yield f"{name}, {when}", {"us": medians, "ratio": [round(one, 2) for one in statistics.quantiles(ratios)]}


def is_dear(result: Mapping[str, Any]) -> bool:
    """Say whether a request takes more than is wanted."""
    return bool(result["ratio"][1] > MOST)


def line(name: str, result: Mapping[str, Any]) -> str:
    """Return a result for a terminal."""
    us, (low, middle, high) = result["us"], result["ratio"]
    measured = f"{us['server']:6.1f} us of the server, {us['bare']:6.1f} us bare: {middle:.2f} [{low:.2f}, {high:.2f}]"
    return f"{name:24} {measured}{'  MORE' if is_dear(result) else ''}"


def markdown_row(name: str, result: Mapping[str, Any]) -> str:
    """Return a row of a table. A ratio that is too large is bold."""
    us, (low, middle, high) = result["us"], result["ratio"]
    ratio = f"{middle:.2f} ({low:.2f} to {high:.2f})"
    return f"| {name} | {us['server']:.1f} | {us['bare']:.1f} | {f'**{ratio}**' if is_dear(result) else ratio} |"


def main() -> int:
    """Run, and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0] if __doc__ else None)
    add_common_arguments(parser, quick="10 rounds instead of 40", check=f"fail if a median is above {MOST}")
    arguments = parser.parse_args()
    if arguments.markdown:
        print("| request | server, us | bare, us | server / bare |\n|---|---|---|---|")
    results = {}
    for name, result in measure(10 if arguments.quick else 40):
        results[name] = result
        if not arguments.json:
            print((markdown_row if arguments.markdown else line)(name, result), flush=True)
    if arguments.json:
        print(json.dumps(results))
    return int(arguments.check and any(map(is_dear, results.values())))


if __name__ == "__main__":
    sys.exit(main())
