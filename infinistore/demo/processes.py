"""Starts the server or the nodes, etcd and the workers as processes.

Every process belongs to a nursery of the caller. When that is cancelled, each process
gets SIGTERM, and SIGKILL five seconds later if it still runs. One that ends by itself
raises `DemoError` with the last line of its standard error.
"""

import json
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from subprocess import PIPE
from typing import Self

import trio
from attrs import define, field

from infinistore.demo.prompts import DemoError, DemoSettings
from infinistore.demo.workers import Found
from infinistore.errors import InfiniStoreException
from infinistore.sizes import MIB, describe_size, format_size

_START_TIMEOUT_S = 60.0


@define(eq=False)
class Process:
    """A child process; its standard error goes to a file in `folder`."""

    title: str
    folder: Path
    url: str = ""
    """Where a server listens."""
    _unread: bytes = b""
    _running: trio.CancelScope = field(factory=trio.CancelScope)
    _over: trio.Event = field(factory=trio.Event)
    process: trio.Process = field(init=False)

    async def start(self, nursery: trio.Nursery, *command: str) -> Self:
        """Start it. In the nursery, it raises `DemoError` if it ends by itself."""
        self.process = await nursery.start(self._run, command)
        return self

    async def _run(self, command: Sequence[str], *, task_status: trio.TaskStatus[trio.Process]) -> None:
        # The variables may be the settings of another server.
        hidden = ("INFINISTORE_", "ETCD_")
        variables = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        log = self.folder / f"{self.title}.log"
        with log.open("wb") as errors, self._running:
            try:
                run = partial(trio.run_process, stdin=PIPE, stdout=PIPE, stderr=errors, check=False, env=variables)
                status = (await run(command, task_status=task_status)).returncode
            finally:
                self._over.set()
            how = f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
            said = log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
            raise DemoError(f"the {self.title} process {how}: {said[-1].strip()}")

    async def end(self, *, kill: bool = False) -> None:
        """End the process: in an orderly way, or as a lost machine does."""
        self._running.cancel()
        if kill:
            self.process.kill()
        await self._over.wait()

    async def next_line(self) -> str:
        """Return the next line of standard output; never, if it has ended."""
        assert self.process.stdout is not None
        while b"\n" not in self._unread:
            if not (data := await self.process.stdout.receive_some()):
                await trio.sleep_forever()  # until the nursery is cancelled by the error that says why
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode(errors="replace")

    async def ask(self, order: Found, on_event: Callable[[str, Found], None]) -> Found:
        """Give a worker an order, pass its events to `on_event`, and return the last of
        them: `ready` or `finished`. One order at a time.
        """
        assert self.process.stdin is not None
        with suppress(trio.BrokenResourceError):  # it has ended
            await self.process.stdin.send_all(json.dumps(order).encode() + b"\n")
        while True:
            event: Found = json.loads(await self.next_line())
            if event["event"] == "failed":
                raise DemoError(f"{self.title}: {event['message']}")
            on_event(self.title, event)
            if event["event"] in ("ready", "finished"):
                return event


@define
class Servers:
    """The server, or the nodes of a cluster, that the demonstration runs. All files lie
    in `folder`.
    """

    nursery: trio.Nursery
    folder: Path
    settings: DemoSettings
    say: Callable[[str, str], None]
    etcd: str = ""
    """Where nodes register, as `HOST:PORT`; without it a file lists them."""
    running: dict[str, Process] = field(factory=dict)
    _states: dict[str, str] = field(factory=dict)

    @property
    def url(self) -> str:
        """The URL of the store."""
        if not self.settings.nodes:
            return self.settings.url or self.running["server"].url
        return f"infinistore+etcd://{self.etcd}/demo" if self.etcd else f"infinistore+file://{self.folder}/nodes.json"

    async def start(self, title: str = "server", *flags: str, port: int = 0) -> None:
        """Start a server on a port of this machine, a free one unless it is given, with
        TCP only; wait until it listens.
        """
        command = [sys.executable, "-P", "-m", "infinistore", "--host", "127.0.0.1", "--service-port", str(port)]
        command += ["--manage-port", "0", "--unix-socket", "off"]
        command += ["--prealloc-size", format_size(self.settings.pool_bytes), *flags]
        note = ""
        if self.settings.disk:
            # Room for both prompts, and the pool once more.
            size_bytes = max(3 * self.settings.pool_bytes, 256 * MIB)
            command += ["--disk", f"{self.folder}/disk:{format_size(size_bytes)}"]
            command += ["--disk-wait", "60"]  # however slow the disk is, what it has is to be found
            note = f", with a disk of {describe_size(size_bytes)}"
        server = await Process(title, self.folder).start(self.nursery, *command)
        with trio.move_on_after(_START_TIMEOUT_S):
            while not (address := re.search(r"tcp://127\.0\.0\.1:\d+", await server.next_line())):
                pass
            self.running[title], server.url = server, address.group()
            return self.say(title, f"process {server.process.pid} listens at {server.url}{note}")
        raise DemoError(f"the server did not say within {_START_TIMEOUT_S:.0f} s that it listens")

    async def restart(self) -> None:
        """Stop the server in an orderly way, and start another one at its address."""
        port = int(self.url.rpartition(":")[2])
        await self.running["server"].end()
        await self.start(port=port)

    async def start_node(self, *, warm_up_s: float = 0.0) -> str:
        """Start another node, and return its name. Without etcd, it has joined at once,
        and is warm after `set_state`.
        """
        name = f"node-{len(self._states) + 1}"
        flags = ["--cluster", self.url, "--node-id", name, "--node-warm-up", str(warm_up_s)]
        await self.start(name, *flags if self.etcd else ())
        self.set_state(name, "joining" if warm_up_s else "serving")
        return name

    def set_state(self, name: str, state: str) -> None:
        """Say in the file that a node has joined, or that it is gone, as an operator
        would. With etcd, the nodes do that."""
        self._states[name] = state
        nodes = [
            {"id": name, "address": node.url.partition("://")[2], "state": self._states[name]}
            for name, node in self.running.items()
        ]
        new = self.folder / "nodes.new"
        new.write_text(json.dumps({"nodes": nodes}))
        new.replace(self.folder / "nodes.json")

    async def start_etcd(self, program: str) -> None:
        """Start an etcd, on free ports of this machine; wait until it listens."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        clients, peers = f"http://127.0.0.1:{port}", "http://127.0.0.1:0"
        command = [program, "--name", "demo", "--data-dir", str(self.folder / "etcd"), "--log-level", "error"]
        command += ["--listen-client-urls", clients, "--advertise-client-urls", clients, "--listen-peer-urls", peers]
        command += ["--initial-advertise-peer-urls", peers, "--initial-cluster", f"demo={peers}"]
        etcd = await Process("etcd", self.folder).start(self.nursery, *command)
        self.etcd = f"127.0.0.1:{port}"
        self.say("etcd", f"process {etcd.process.pid} listens at {self.etcd}; the nodes register there")
        with trio.move_on_after(_START_TIMEOUT_S):
            while True:
                with suppress(OSError):
                    return await (await trio.open_tcp_stream("127.0.0.1", port)).aclose()
                await trio.sleep(0.05)
        raise DemoError(f"etcd did not take connections within {_START_TIMEOUT_S:.0f} s")


@asynccontextmanager
async def own_servers(settings: DemoSettings, say: Callable[[str, str], None]) -> AsyncIterator[Servers]:
    """Run a server, or as many nodes as the settings name, unless they name a server
    that runs already; end them, etcd last. If one ends before, that is the error that
    is raised, whatever went wrong in consequence.
    """
    with tempfile.TemporaryDirectory(prefix="infinistore-demo-") as folder:  # nobody else may enter it
        async with trio.open_nursery() as around:
            servers = Servers(around, Path(folder), settings, say)
            if settings.nodes and (program := shutil.which("etcd")):
                await servers.start_etcd(program)
            elif settings.nodes:
                remedy = "on Debian: apt-get install etcd-server"
                say("cluster", f"etcd is not installed ({remedy}): a file lists the nodes instead")
            async with trio.open_nursery() as nursery:
                servers.nursery = nursery
                if not settings.nodes and settings.url is None:
                    await servers.start()
                for _ in range(settings.nodes):
                    await servers.start_node()
                try:
                    yield servers
                except* (DemoError, InfiniStoreException):
                    if servers.running:  # that one has ended may be the reason, and is said first
                        await trio.sleep(0.5)
                    raise
                nursery.cancel_scope.cancel()
            around.cancel_scope.cancel()
