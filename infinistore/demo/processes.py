"""Starts the server and the workers as processes, reads their output, and ends them.

Every process belongs to a nursery of the caller. When the nursery is cancelled, by
Ctrl-C or by a failure, each process gets SIGTERM, and SIGKILL five seconds later if it
still runs. A process that ends unexpectedly raises `DemoError` with its last output.

The server has a disk or none, and can be restarted. A disk lies in a temporary folder
that nobody else may enter, and that is removed at the end.
"""

import os
import re
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import trio

from infinistore.demo.messages import (
    DemoError,
    Event,
    Failed,
    Finished,
    Job,
    LineReader,
    Ready,
    Setup,
    decode_event,
    encode_order,
)
from infinistore.demo.settings import DISK_RATIO
from infinistore.disk_settings import DiskPlace
from infinistore.errors import InfiniStoreException
from infinistore.sizes import MIB, format_size

_START_TIMEOUT_S = 60.0
_ENDING_S = 0.5
_ETCD_CHECK_S = 0.05
_KEPT_LINES = 20
_ADDRESS = re.compile(r"tcp://127\.0\.0\.1:\d+")


class _Process:
    """A child process; the last lines of its standard error are kept for errors."""

    def __init__(self, title: str, process: trio.Process) -> None:
        self.title = title
        self._process = process
        self._said: deque[str] = deque(maxlen=_KEPT_LINES)
        self._stderr_read = trio.Event()
        assert process.stdout is not None
        self._stdout = LineReader(process.stdout)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    async def keep_stderr(self) -> None:
        """Read standard error until its end, because a full pipe would block
        the child.
        """
        assert self._process.stderr is not None
        reader = LineReader(self._process.stderr)
        try:
            while (line := await reader.next_line()) is not None:
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


class ServerProcess(_Process):
    """A server that listens at `url`."""

    url: str = ""
    _is_to_end = False

    async def wait_until_ready(self) -> None:
        """Wait until the server has printed its address."""
        with trio.move_on_after(_START_TIMEOUT_S):
            while (line := await self._stdout.next_line()) is not None:
                if address := _ADDRESS.search(line.decode(errors="replace")):
                    self.url = address.group()
                    return
            raise await self.ended()
        raise DemoError(f"the server did not say within {_START_TIMEOUT_S:.0f} s that it listens")

    async def raise_if_ended(self) -> None:
        """Raise `DemoError` if the server has ended or is ending."""
        with trio.move_on_after(_ENDING_S):
            raise await self.ended()

    async def raise_when_ended(self) -> None:
        """Read the pipe while the server runs; raise `DemoError` when it ends."""
        while await self._stdout.next_line() is not None:
            pass
        if not self._is_to_end:
            raise await self.ended()

    async def stop(self) -> None:
        """Tell the server to end in an orderly way, and wait for it."""
        self._is_to_end = True
        self._process.terminate()
        if await self._process.wait() != 0:
            raise await self.ended()

    async def kill(self) -> None:
        """End the server without a warning, as a lost machine does."""
        self._is_to_end = True
        self._process.kill()
        await self._process.wait()


class EtcdProcess(_Process):
    """A member of etcd, the only one, that clients reach at `address`."""

    def __init__(self, process: trio.Process, address: tuple[str, int]) -> None:
        super().__init__("etcd", process)
        self.address = address

    async def wait_until_ready(self) -> None:
        """Wait until it takes connections."""
        while True:
            try:
                stream = await trio.open_tcp_stream(*self.address)
            except OSError:
                await trio.sleep(_ETCD_CHECK_S)
            else:
                await stream.aclose()
                return

    async def raise_when_ended(self) -> None:
        """Raise `DemoError` when it ends."""
        raise await self.ended()


class WorkerProcess(_Process):
    """A prefill or decode process that has opened the store."""

    def __init__(self, title: str, process: trio.Process, on_event: Callable[[str, Event], None]) -> None:
        super().__init__(title, process)
        self._on_event = on_event
        assert process.stdin is not None
        self._stdin = process.stdin

    async def set_up(self, setup: Setup) -> None:
        """Configure the worker, and wait until it has opened the store."""
        await self._order(setup)
        while not isinstance(await self._next_event(), Ready):
            pass

    async def run(self, job: Job) -> Finished:
        """Run `job`, and pass its events to `on_event`. One job at a time."""
        await self._order(job)
        while not isinstance(event := await self._next_event(), Finished):
            pass
        return event

    async def finish(self) -> None:
        """Tell the worker that there is no more work, and wait for its end."""
        await self._stdin.aclose()
        if await self._process.wait() != 0:
            raise await self.ended()

    async def _order(self, order: Setup | Job) -> None:
        with suppress(trio.BrokenResourceError):  # it has ended: `_next_event` will find out why
            await self._stdin.send_all(encode_order(order))

    async def _next_event(self) -> Event:
        line = await self._stdout.next_line()
        if line is None:
            raise await self.ended()
        event = decode_event(line)
        self._on_event(self.title, event)
        if isinstance(event, Failed):
            raise DemoError(f"{self.title}: {event.message}")
        return event


async def _start(
    nursery: trio.Nursery, module: str, *arguments: str, environment: dict[str, str] | None = None
) -> trio.Process:
    return await _run(nursery, [sys.executable, "-P", "-m", module, *arguments], environment)


async def _run(nursery: trio.Nursery, command: list[str], environment: dict[str, str] | None) -> trio.Process:
    pipe = subprocess.PIPE
    run = partial(trio.run_process, stdin=pipe, stdout=pipe, stderr=pipe, check=False, env=environment)
    process: trio.Process = await nursery.start(run, command)
    return process


async def start_server(
    nursery: trio.Nursery,
    pool_bytes: int,
    *,
    port: int = 0,
    disk: DiskPlace | None = None,
    title: str = "server",
    more: Sequence[str] = (),
) -> ServerProcess:
    """Start a server on a port of this machine, a free one unless it is given, with TCP
    only; wait until it listens.

    Raises `DemoError` with the server's own words if it does not start.
    """
    command = ["--host", "127.0.0.1", "--service-port", str(port), "--manage-port", "0", "--unix-socket", "off"]
    # Without the settings of another server that may stand in this process's
    # environment.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("INFINISTORE_")}
    command += ["--prealloc-size", format_size(pool_bytes)]
    command += more
    if disk is not None:
        # However slow the disk is, what it has is to be found.
        command += ["--disk", str(disk), "--disk-wait", f"{_START_TIMEOUT_S:.0f}"]
    process = await _start(nursery, "infinistore", *command, environment=environment)
    server = ServerProcess(title, process)
    nursery.start_soon(server.keep_stderr)
    await server.wait_until_ready()
    return server


async def start_etcd(nursery: trio.Nursery, program: str, folder: Path) -> EtcdProcess:
    """Start an etcd of its own on free ports of this machine, with its data in a
    folder.

    Raises `DemoError` with its own words if it does not start.
    """
    client, peer = _free_ports(2)
    clients, peers = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
    command = [program, "--name", "demo", "--data-dir", str(folder), "--log-level", "error"]
    command += ["--listen-client-urls", clients, "--advertise-client-urls", clients]
    command += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
    command += ["--initial-cluster", f"demo={peers}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
    etcd = EtcdProcess(await _run(nursery, command, environment), ("127.0.0.1", client))
    nursery.start_soon(etcd.keep_stderr)
    nursery.start_soon(etcd.raise_when_ended)
    with trio.move_on_after(_START_TIMEOUT_S):
        await etcd.wait_until_ready()
        return etcd
    raise DemoError(f"etcd did not take connections within {_START_TIMEOUT_S:.0f} s")


def _free_ports(count: int) -> list[int]:
    with ExitStack() as sockets:
        made = [sockets.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in made]


async def start_worker(
    nursery: trio.Nursery, title: str, setup: Setup, on_event: Callable[[str, Event], None]
) -> WorkerProcess:
    """Start the worker `title`, "prefill" or "decode"; return when it has opened the
    store.
    """
    worker = WorkerProcess(title, await _start(nursery, "infinistore.demo.workers", title), on_event)
    nursery.start_soon(worker.keep_stderr)
    await worker.set_up(setup)
    return worker


_SMALLEST_DISK_BYTES = 256 * MIB


class OwnServer:
    """A server that runs, and the disk that it has, if any. Make one with
    `own_server`.
    """

    def __init__(self, nursery: trio.Nursery, pool_bytes: int, disk: DiskPlace | None) -> None:
        self.disk = disk
        self._nursery = nursery
        self._pool_bytes = pool_bytes
        self._process: ServerProcess

    @property
    def pid(self) -> int:
        """The number of its process."""
        return self._process.pid

    @property
    def url(self) -> str:
        """Where it listens: the same after a restart."""
        return self._process.url

    async def start(self, port: int = 0) -> None:
        """Start it; raises `DemoError` if it does not start, and in the nursery if it
        ends.
        """
        self._process = await start_server(self._nursery, self._pool_bytes, port=port, disk=self.disk)
        self._nursery.start_soon(self._process.raise_when_ended)

    async def restart(self) -> None:
        """Stop it in an orderly way, and start another one at the same address."""
        await self._process.stop()
        await self.start(int(self.url.rpartition(":")[2]))

    async def raise_if_ended(self) -> None:
        """Raise `DemoError` if it has ended or is ending."""
        await self._process.raise_if_ended()


@asynccontextmanager
async def own_server(pool_bytes: int, *, disk: bool) -> AsyncIterator[OwnServer]:
    """Run a server, and end it. If it ends before, that is the error that is raised,
    whatever went wrong in consequence.
    """
    with ExitStack() as folders:
        place = None
        if disk:
            folder = folders.enter_context(tempfile.TemporaryDirectory(prefix="infinistore-demo-"))
            place = DiskPlace(Path(folder, "disk"), max(DISK_RATIO * pool_bytes, _SMALLEST_DISK_BYTES))
        async with trio.open_nursery() as nursery:
            server = OwnServer(nursery, pool_bytes, place)
            await server.start()
            try:
                yield server
            except* (DemoError, InfiniStoreException):
                await server.raise_if_ended()
                raise
            nursery.cancel_scope.cancel()  # ends the server
