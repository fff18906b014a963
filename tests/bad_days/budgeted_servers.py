"""Servers on a machine that has just so much memory: each a process, forked from one
that has everything loaded.

    python tests/bad_days/budgeted_servers.py

Each line on standard input is a server to be started, in JSON: `port`, `unix_socket`,
`pool_bytes`, `budget_bytes`, and `keepers`, the processes that take memory of the
machine besides it. Standard output says, with the `pid` in either case, at which `port`
it is, or why it `refused`.
"""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import trio

from infinistore.config import ServerConfig
from infinistore.core import arena
from infinistore.errors import InfiniStoreException
from infinistore.host import MemoryLimit
from infinistore.server import serve
from tests import warm
from tests.bad_days.memory import kept_by
from tests.ports import own_ports

__all__ = ["BudgetedServers", "Refused", "Running", "budgeted_servers"]

_GENEROUS_S = 20


class Refused(Exception):
    """The server did not start."""


@attrs.frozen(eq=False)
class Running:
    """A server that was started."""

    pid: int
    port: int
    descriptor: int
    """A pidfd."""

    def send(self, number: signal.Signals) -> None:
        signal.pidfd_send_signal(self.descriptor, number)

    def has_ended(self, within_s: float = _GENEROUS_S) -> bool:
        """Wait for its end, at most so long."""
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return bool(poll.poll(within_s * 1000))


class BudgetedServers:
    """Starts servers at one address."""

    def __init__(self, program: "subprocess.Popen[str]", unix_socket: Path, pool_bytes: int) -> None:
        self.unix_socket = unix_socket
        self.pool_bytes = pool_bytes
        self.port = own_ports(1)[0]
        self._program = program
        self._started: list[Running] = []

    def start(self, budget_bytes: int, keepers: Sequence[int]) -> Running:
        """Start one; Refused if there is no room for its pool, or for it."""
        assert self._program.stdin is not None and self._program.stdout is not None
        what = {"port": self.port, "unix_socket": str(self.unix_socket), "pool_bytes": self.pool_bytes}
        json.dump({**what, "budget_bytes": budget_bytes, "keepers": keepers}, self._program.stdin)
        self._program.stdin.write("\n")
        self._program.stdin.flush()
        answer = json.loads(self._program.stdout.readline())
        if "refused" in answer:
            raise Refused(answer["refused"])
        running = Running(answer["pid"], self.port, os.pidfd_open(answer["pid"]))
        self._started.append(running)
        return running

    def end(self) -> None:
        """Kill what is left."""
        for running in self._started:
            with suppress(ProcessLookupError):
                running.send(signal.SIGKILL)
            assert running.has_ended()
            os.close(running.descriptor)
        self._started.clear()


@contextmanager
def budgeted_servers(unix_socket: Path, pool_bytes: int) -> Iterator[BudgetedServers]:
    """Have the program that starts servers, until the block is left."""
    root = Path(__file__).parents[2]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("INFINISTORE_")}
    environment["PYTHONPATH"] = str(root)
    command = [sys.executable, "-W", "error", "-m", "tests.bad_days.budgeted_servers"]
    with warm.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=root
    ) as program:
        servers = BudgetedServers(program, unix_socket, pool_bytes)
        try:
            yield servers
        finally:
            servers.end()
            program.kill()


async def _serve(config: ServerConfig) -> None:
    async with trio.open_nursery() as nursery:
        addresses = await nursery.start(partial(serve, config, handle_signals=True))
        _say({"pid": os.getpid(), "port": addresses.port})


def _run(what: dict[str, Any]) -> None:
    keepers = [*what["keepers"], os.getpid()]

    def available_memory() -> MemoryLimit:
        left_bytes = what["budget_bytes"] - sum(kept_by(*keepers).values())
        return MemoryLimit(arena.MEMORY_MARGIN_BYTES + left_bytes, "what the test leaves")

    setattr(arena, "available_memory", available_memory)  # noqa: B010  # which it does not export
    config = ServerConfig(
        service_port=what["port"],
        manage_port=None,
        unix_socket=what["unix_socket"],
        prealloc_bytes=what["pool_bytes"],
        minimal_allocate_bytes=4096,
        drain_timeout_s=3600,
    )
    try:
        trio.run(_serve, config)
    except* InfiniStoreException as group:
        _say({"pid": os.getpid(), "refused": str(group.exceptions[0])})


def _say(what: dict[str, Any]) -> None:
    os.write(1, (json.dumps(what) + "\n").encode())


def main() -> None:
    """Start what standard input says, until it ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that who has ended is gone
    for line in sys.stdin:
        if not os.fork():
            try:
                _run(json.loads(line))
            finally:
                os._exit(0)


if __name__ == "__main__":
    main()
