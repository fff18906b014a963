"""One shard: a server that a supervisor has started, and that ends with it; and the
link between the two, a pair of sockets.

It takes no memory before all shards have their ports, its management API is on a Unix
socket of the supervisor, and it obeys the link instead of Ctrl-C. Each message is one
packet, a pickle: both ends are the same program of the same user. The kernel closes the
supervisor's end with its process, and the shard takes that as its own end. A shard
gives a sign of life again and again; the supervisor counts its silence in beats of its
own, so no clock is compared, and a machine that slept kills no shard.
"""

import enum
import os
import pickle
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import attrs
import trio

from infinistore.config import ServerConfig
from infinistore.errors import ConfigError, InfiniStoreException, OutOfMemory
from infinistore.protocol.messages import Shard
from infinistore.server.composition import run_server
from infinistore.server.environment import Environment
from infinistore.server.listeners import Listeners, ServerAddresses, open_listeners
from infinistore.server.security import Reloads, reload_on_signal
from infinistore.server.server import Server
from infinistore.service_manager import ServiceManager
from infinistore.transports.sockets.unix_listener import listen_unix

LONGEST_BYTES: Final = 1 << 17
"""Of a message."""
MOST_KEPT: Final = 2000
"""Of so many descriptors a message has room for the names."""
_PARTS: Final = 8
_BEATS: Final = _PARTS + 2
"""More beats than parts: the loop may have stopped just before it would have given a
sign, and the supervisor may have heard the last one just before a beat."""


@attrs.frozen
class Start:
    """To a shard, first of all: its settings."""

    index: int
    config: ServerConfig
    core: int | None
    """The core on which it serves; None for any."""
    management_socket: Path | None
    """The socket of its management API; None without one."""
    beat_s: float
    """The time between its signs of life."""
    service_manager: ServiceManager
    """What keeps its cache, and has kept it: the process inherits the descriptors."""
    must_go_on: bool = False
    """Whether it must not start without what was kept."""


@attrs.frozen
class Listening:
    """From a shard: it has its ports, and has not taken memory yet."""

    addresses: ServerAddresses


@attrs.frozen
class Met:
    """To a shard: the addresses of all. It takes its memory and serves."""

    shards: Sequence[Shard]


@attrs.frozen
class Keep:
    """To a shard: finish the requests under way, have at most so many descriptors kept
    for the next run of all shards, then stop."""

    most: int


@attrs.frozen
class Refused:
    """From a shard: it cannot start, with these settings or on this machine."""

    error: type[InfiniStoreException]
    problem: str


class Signal(enum.Enum):
    """Messages that need no more than a word."""

    ALIVE = "alive"
    """From a shard, again and again: its event loop runs."""
    READY = "ready"
    """From a shard: it has its memory, and could serve."""
    SERVE = "serve"
    """To a shard: all are ready, and this is the server now."""
    SERVING = "serving"
    """From a shard: it serves clients."""
    RELOAD = "reload"
    """To a shard: reload, as at SIGHUP."""
    DRAIN = "drain"
    """To a shard: finish the requests under way, then stop."""


Message: TypeAlias = Start | Listening | Met | Keep | Refused | Signal


class Link:
    """One end. Within Trio only."""

    def __init__(self, sock: socket.socket) -> None:
        self._plain = sock
        self._sock = trio.socket.from_stdlib_socket(sock)
        self._sending = trio.Lock()

    @staticmethod
    def pair() -> "tuple[Link, socket.socket]":
        """Return the supervisor's end, and the shard's, to be given to its process."""
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return Link(own), other

    async def send(self, message: Message) -> None:
        """Send a message; to an end that is gone, nothing."""
        async with self._sending:  # it may have to wait for room, and only one task can
            try:
                await self._sock.send(pickle.dumps(message))
            except OSError:  # the receiver finds that out by itself
                await trio.lowlevel.checkpoint()

    async def receive(self) -> Message | None:
        """Wait for the next message; None if the other end is gone."""
        try:
            data = await self._sock.recv(LONGEST_BYTES)
        except OSError:
            return None
        message: Message | None = pickle.loads(data) if data else None
        return message

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._sock.close()


def beat_of(bound_s: float) -> float:
    """Return the time between two signs of life if a loop may hang for `bound_s`."""
    return bound_s / _PARTS


class Silence:
    """The silence of one process.

    It is too long if the loop has stood still for the bound of `beat_of`. A supervisor
    that runs all the time finds that within 1.5 times the bound.
    """

    def __init__(self, beat_s: float) -> None:
        self._beat_s = beat_s
        self._beats = 0
        self._begun = trio.Event()

    def heard(self) -> None:
        """Note a sign of life."""
        self._beats = 0
        self._begun.set()

    @property
    def has_begun(self) -> bool:
        """Whether the process has given a sign of life."""
        return self._begun.is_set()

    async def wait(self) -> None:
        """Wait until it lasts too long, counted from the first sign of life on."""
        await self._begun.wait()
        while self._beats < _BEATS:
            await trio.sleep(self._beat_s)
            self._beats += 1


class ShardProcess:
    """The process of a shard, at its end of the link. Until `run`, nothing of it runs
    in Trio.

    EOFError: its supervisor is gone already.
    """

    def __init__(self, descriptor: int) -> None:
        sock = socket.socket(fileno=descriptor)
        first = sock.recv(LONGEST_BYTES)
        if not first:
            raise EOFError
        self.start: Start = pickle.loads(first)
        """Its settings."""
        for kept in self.start.service_manager.kept.values():
            os.set_inheritable(kept, False)
        self._link = Link(sock)
        self._server: Server | None = None
        self._met = trio.Event()
        self._all_ready = trio.Event()
        self._shards: Sequence[Shard] = ()
        self._scope = trio.CancelScope()
        self._reloads = Reloads()
        self._reloads.add(self._reload)

    async def run(self, on_serving: Callable[[], None]) -> None:
        """Serve until told to stop; report a refusal to start to the supervisor."""
        refused: Refused | None = None
        with self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._obey)
                nursery.start_soon(self._beat)
                await nursery.start(self._drain_on_signal)
                await nursery.start(reload_on_signal, self._reloads)
                refused = await self._serve(on_serving)
                nursery.cancel_scope.cancel()
        if refused is not None:
            await self._link.send(refused)
        self._link.close()

    async def _serve(self, on_serving: Callable[[], None]) -> Refused | None:
        """Serve. Return the reason if the shard cannot start."""
        start = self.start
        refused = None
        environment = Environment(
            open_listeners=partial(_listen, start.management_socket),
            service_manager=start.service_manager,
            meet_shards=self._meet,
            may_serve=self._wait_for_all,
            must_go_on=start.must_go_on,
            run_in_thread=partial(_run_on_any_core, frozenset(os.sched_getaffinity(0))),
        )
        serving = trio.Event()

        def listening(server: Server) -> None:
            self._server = server
            serving.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tell_when, serving, on_serving)
            try:
                await run_server(start.config, environment=environment, on_listening=listening)
            except (ConfigError, OutOfMemory) as error:
                refused = Refused(type(error), str(error))
            nursery.cancel_scope.cancel()
        return refused

    async def _tell_when(self, serving: trio.Event, on_serving: Callable[[], None]) -> None:
        await serving.wait()
        if self.start.core is not None:
            with suppress(OSError):  # the core has been taken away since
                os.sched_setaffinity(0, [self.start.core])
        on_serving()
        await self._link.send(Signal.SERVING)

    async def _meet(self, addresses: ServerAddresses) -> Sequence[Shard]:
        await self._link.send(Listening(addresses))
        await self._met.wait()
        return self._shards

    async def _wait_for_all(self) -> None:
        await self._link.send(Signal.READY)
        await self._all_ready.wait()

    async def _beat(self) -> None:
        """Send a sign of life in each beat."""
        while True:
            await self._link.send(Signal.ALIVE)
            await trio.sleep(self.start.beat_s)

    async def _obey(self) -> None:
        """Follow the supervisor's messages; end with the supervisor."""
        while (message := await self._link.receive()) is not None:
            if isinstance(message, Met):
                self._shards = message.shards
                self._met.set()
            elif message is Signal.SERVE:
                self._all_ready.set()
            elif isinstance(message, Keep):
                self.start.service_manager.most_kept = message.most
                self._drain()
            elif message is Signal.DRAIN:
                self._drain()
            elif message is Signal.RELOAD:
                await self._reloads.run()
        self._scope.cancel()

    async def _drain_on_signal(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Drain on SIGTERM; end on another one."""
        with trio.open_signal_receiver(signal.SIGTERM) as signals:
            task_status.started()
            async for _ in signals:
                if self._server is not None and self._server.draining:
                    self._scope.cancel()
                self._drain()

    async def _reload(self) -> str:
        problems = [] if self._server is None else await self._server.reloads.run()  # without: it has just read all
        return "; ".join(problems)

    def _drain(self) -> None:
        if self._server is None:
            self._scope.cancel()
        else:
            self._server.drain()


def _listen(
    management_socket: Path | None, config: ServerConfig, resources: ExitStack, given: Sequence[socket.socket] = ()
) -> Listeners:
    """Listen as a server does, but for the management API."""
    found = open_listeners(attrs.evolve(config, manage_port=None), resources, given)
    if management_socket is None:
        return found
    return attrs.evolve(found, management=[resources.enter_context(listen_unix(management_socket))])


async def _run_on_any_core(cores: frozenset[int], function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a blocking function in a thread, on any core."""

    def run() -> Any:
        with suppress(OSError):
            os.sched_setaffinity(0, cores)
        return function(*arguments)

    run_sync: Callable[..., Awaitable[Any]] = trio.to_thread.run_sync
    return await run_sync(run)
