"""Starts the server, the nodes and the workers as processes, and ends them.

Every process belongs to a nursery of the caller. When the nursery is cancelled, by
Ctrl-C or by a failure, each process gets SIGTERM, and SIGKILL five seconds later if it
still runs. A process that ends unexpectedly raises `DemoError` with its last output.

A disk, the data of etcd, and the file that lists the nodes without one lie in a
temporary folder that nobody else may enter, and that is removed at the end.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Self

import trio
from attrs import define

from infinistore.demo.prompts import DemoError
from infinistore.demo.workers import Event, Failed, Finished, Job, LineReader, Ready, Setup, decode, encode
from infinistore.disk_settings import DiskPlace
from infinistore.errors import InfiniStoreException
from infinistore.sizes import MIB, format_size

_START_TIMEOUT_S = 60.0
_ENDING_S = 0.5
_ETCD_CHECK_S = 0.05
_KEPT_LINES = 20
_ADDRESS = re.compile(r"tcp://127\.0\.0\.1:\d+")
_DISK_RATIO = 3  # how many times the pool: room for both prompts, and the pool once more
_SMALLEST_DISK_BYTES = 256 * MIB


class Process:
    """A child process; the last lines of its standard error are kept for errors."""

    def __init__(self, title: str, process: trio.Process) -> None:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self.title = title
        self.pid = process.pid
        self.url = ""
        """Where a server listens."""
        self.stdin, self.stdout = process.stdin, LineReader(process.stdout)
        self._process = process
        self._stderr = LineReader(process.stderr)
        self._said: deque[str] = deque(maxlen=_KEPT_LINES)
        self._stderr_read = trio.Event()
        self._is_to_end = False

    @classmethod
    async def start(cls, nursery: trio.Nursery, title: str, command: Sequence[str], hidden: str = "") -> Self:
        """Start a process, without the variables of the environment that begin with
        `hidden`: they may be the settings of another server.
        """
        environment = {name: value for name, value in os.environ.items() if not hidden or not name.startswith(hidden)}
        pipe = subprocess.PIPE
        run = partial(trio.run_process, stdin=pipe, stdout=pipe, stderr=pipe, check=False, env=environment)
        process = cls(title, await nursery.start(run, command))
        nursery.start_soon(process._keep_stderr)
        return process

    async def _keep_stderr(self) -> None:
        """Read standard error until its end: a full pipe would block the child."""
        try:
            while (line := await self._stderr.next_line()) is not None:
                self._said.append(line.decode(errors="replace").strip())
        finally:
            self._stderr_read.set()

    async def ended(self) -> DemoError:
        """Wait for the end of the process. Returns a description of it."""
        status = await self._process.wait()
        with trio.move_on_after(1):  # a grandchild could keep the pipe open
            await self._stderr_read.wait()
        how = f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
        last = next((line for line in reversed(self._said) if line), "it said nothing")
        return DemoError(f"the {self.title} process {how}: {last}")

    async def raise_when_ended(self) -> None:
        """Read the pipe while the process runs; raise `DemoError` when it ends by
        itself."""
        while await self.stdout.next_line() is not None:
            pass
        if not self._is_to_end:
            raise await self.ended()

    async def stop(self) -> None:
        """Tell the process to end in an orderly way, and wait for it."""
        self._is_to_end = True
        self._process.terminate()
        await self.wait()

    async def kill(self) -> None:
        """End the process without a warning, as a lost machine does."""
        self._is_to_end = True
        self._process.kill()
        await self._process.wait()

    async def wait(self) -> None:
        """Wait for the end; raise `DemoError` if it is not an orderly one."""
        if await self._process.wait() != 0:
            raise await self.ended()


async def start_server(
    nursery: trio.Nursery, pool_bytes: int, *, port: int = 0, title: str = "server", more: Sequence[str] = ()
) -> Process:
    """Start a server on a port of this machine, a free one unless it is given, with TCP
    only; wait until it listens. It raises `DemoError` in the nursery if it ends.

    Raises `DemoError` with the server's own words if it does not start.
    """
    command = [sys.executable, "-P", "-m", "infinistore", "--host", "127.0.0.1", "--service-port", str(port)]
    command += ["--manage-port", "0", "--unix-socket", "off", "--prealloc-size", format_size(pool_bytes), *more]
    server = await Process.start(nursery, title, command, hidden="INFINISTORE_")
    with trio.move_on_after(_START_TIMEOUT_S):
        while (line := await server.stdout.next_line()) is not None:
            if address := _ADDRESS.search(line.decode(errors="replace")):
                server.url = address.group()
                nursery.start_soon(server.raise_when_ended)
                return server
        raise await server.ended()
    raise DemoError(f"the server did not say within {_START_TIMEOUT_S:.0f} s that it listens")


class Worker(Process):
    """A prefill or decode process."""

    async def ask(self, order: Setup | Job, on_event: Callable[[str, Event], None]) -> Event:
        """Give the worker an order, pass its events to `on_event`, and return the last
        of them: `Ready` or `Finished`. One order at a time.
        """
        with suppress(trio.BrokenResourceError):  # it has ended: that is found out below
            await self.stdin.send_all(encode(order))
        while (line := await self.stdout.next_line()) is not None:
            event = decode(line)
            assert not isinstance(event, Setup | Job)
            on_event(self.title, event)
            if isinstance(event, Failed):
                raise DemoError(f"{self.title}: {event.message}")
            if isinstance(event, Ready | Finished):
                return event
        raise await self.ended()

    async def finish(self) -> None:
        """Tell the worker that there is no more work, and wait for its end."""
        await self.stdin.aclose()
        await self.wait()


@define
class OwnServer:
    """A server that runs, and the disk that it has, if any."""

    process: Process
    disk: DiskPlace | None
    _start: Callable[..., Awaitable[Process]]

    async def restart(self) -> None:
        """Stop it in an orderly way, and start another one at the same address."""
        await self.process.stop()
        self.process = await self._start(port=int(self.process.url.rpartition(":")[2]))


@asynccontextmanager
async def own_server(pool_bytes: int, *, disk: bool) -> AsyncIterator[OwnServer]:
    """Run a server, and end it. If it ends before, that is the error that is raised,
    whatever went wrong in consequence.
    """
    with tempfile.TemporaryDirectory(prefix="infinistore-demo-") as folder:
        place = DiskPlace(Path(folder, "disk"), max(_DISK_RATIO * pool_bytes, _SMALLEST_DISK_BYTES)) if disk else None
        # However slow the disk is, what it has is to be found.
        more = [] if place is None else ["--disk", str(place), "--disk-wait", f"{_START_TIMEOUT_S:.0f}"]
        async with trio.open_nursery() as nursery:
            start = partial(start_server, nursery, pool_bytes, more=more)
            server = OwnServer(await start(), place, start)
            try:
                yield server
            except* (DemoError, InfiniStoreException):
                with trio.move_on_after(_ENDING_S):
                    raise await server.process.ended() from None
                raise
            nursery.cancel_scope.cancel()  # ends the server


class OwnCluster:
    """Nodes that run, by their names. Make one with `own_cluster`."""

    def __init__(self, nursery: trio.Nursery, pool_bytes: int, folder: Path, etcd: str) -> None:
        self.nodes: dict[str, Process] = {}
        self.has_etcd = bool(etcd)
        """Whether the nodes register in an etcd; else a file lists them."""
        self._file = folder / "nodes.json"
        self.url = f"infinistore+etcd://{etcd}/demo" if etcd else f"infinistore+file://{self._file}"
        self._start = partial(start_server, nursery, pool_bytes)
        self._states: dict[str, str] = {}

    async def start_node(self, *, warm_up_s: float = 0.0) -> Process:
        """Start another node. Without etcd, it has joined at once, and is warm after
        `set_states`.

        Raises `DemoError` if it does not start, and in the nursery if it ends.
        """
        name = f"node-{len(self._states) + 1}"
        flags = ["--cluster", self.url, "--node-id", name, "--node-warm-up", str(warm_up_s)]
        self.nodes[name] = await self._start(title=name, more=flags if self.has_etcd else ())
        self.set_state(name, "joining" if warm_up_s else "serving")
        return self.nodes[name]

    async def kill(self, name: str) -> None:
        """Kill a node. In etcd it stays until its lease has run out."""
        await self.nodes.pop(name).kill()

    def set_state(self, name: str, state: str) -> None:
        """Say in the file that a node has joined, or that it is gone, as an operator
        would. With etcd, the nodes do that."""
        self._states[name] = state
        if self.has_etcd:
            return
        nodes = [
            {"id": name, "address": node.url.partition("://")[2], "state": self._states[name]}
            for name, node in self.nodes.items()
        ]
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps({"nodes": nodes}))
        os.replace(new, self._file)


@asynccontextmanager
async def own_cluster(nodes: int, pool_bytes: int, say: Callable[[str, str], None]) -> AsyncIterator[OwnCluster]:
    """Run a cluster of so many nodes, each with a pool of this size, and end it: first
    its nodes, then etcd.
    """
    with tempfile.TemporaryDirectory(prefix="infinistore-demo-") as folder:
        async with trio.open_nursery() as around:
            etcd = ""
            if program := shutil.which("etcd"):
                process, etcd = await _start_etcd(around, program, folder)
                say("etcd", f"process {process.pid} listens at {etcd}; the nodes register there")
            else:
                remedy = "on Debian: apt-get install etcd-server"
                say("cluster", f"etcd is not installed ({remedy}): a file lists the nodes instead")
            async with trio.open_nursery() as nursery:
                cluster = OwnCluster(nursery, pool_bytes, Path(folder), etcd)
                for _ in range(nodes):
                    node = await cluster.start_node()
                    say(node.title, f"process {node.pid} listens at {node.url}")
                yield cluster
                nursery.cancel_scope.cancel()
            around.cancel_scope.cancel()


async def _start_etcd(nursery: trio.Nursery, program: str, folder: str) -> tuple[Process, str]:
    """Start an etcd on free ports of this machine, and return where it listens.

    Raises `DemoError` with its own words if it does not start.
    """
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        port, peer_port = one.getsockname()[1], other.getsockname()[1]
    clients, peers = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
    command = [program, "--name", "demo", "--data-dir", str(Path(folder, "etcd")), "--log-level", "error"]
    command += ["--listen-client-urls", clients, "--advertise-client-urls", clients]
    command += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
    command += ["--initial-cluster", f"demo={peers}"]
    etcd = await Process.start(nursery, "etcd", command, hidden="ETCD_")
    nursery.start_soon(etcd.raise_when_ended)
    with trio.move_on_after(_START_TIMEOUT_S):
        while True:
            try:
                stream = await trio.open_tcp_stream("127.0.0.1", port)
            except OSError:
                await trio.sleep(_ETCD_CHECK_S)
            else:
                await stream.aclose()
                return etcd, f"127.0.0.1:{port}"
    raise DemoError(f"etcd did not take connections within {_START_TIMEOUT_S:.0f} s")
