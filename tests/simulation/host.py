"""A host whose processes share memory: a server, and clients that map its pool.

As a plug it gives a server its tables, its shared memory mover and a Unix socket.
`SharedHost.client` gives a client what it takes from its machine. Each server and each
client is a process (see `processes`) that may be stopped at any access to a table, and
killed there.
"""

import math
import os
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import attrs
import trio

from infinistore.client.environment import Environment as ClientEnvironment
from infinistore.client.movers.shm.mapped_pool import Machine, ServerWatch
from infinistore.client.options import StoreUrl
from infinistore.core import StoreCore
from infinistore.protocol import shared_tables
from infinistore.server.environment import Environment
from infinistore.server.movers.base import Mover
from infinistore.server.movers.shm import LivenessPipe, PublishedRemovals, ShmMover
from tests.simulation.buggify import Buggify, buggified_machine
from tests.simulation.network import Listener, NetworkSettings
from tests.simulation.nodes import ServerNode, Sharing
from tests.simulation.processes import STOP_CHANCES, Killed, Process, Processes
from tests.simulation.shared_memory import Copier, Tables, refuse_thread
from tests.simulation.streams import SimulatedStream
from tests.simulation.unix_sockets import UnixNetwork
from tests.simulation.world import Plug, World

__all__ = ["SOCKET", "SharedHost", "SharingSettings"]

SOCKET = "/simulated/store.sock"
_NETWORK = NetworkSettings(least_delay_s=0.000002, most_delay_s=0.0005)
_NOTICED_WITHIN_S = 0.05


@attrs.frozen
class SharingSettings:
    """Which clients share memory with their server, and how."""

    clients: int = 0
    """The first so many of all clients."""
    inline_bytes: int = 0
    """Up to how many bytes a batch goes over the socket."""
    known_blocks: int = 65536
    asks_by_tcp: bool = False
    """Whether clients ask for the Unix socket over TCP first."""
    asks_ahead: bool = False
    """Whether a put asks for the space of the next one, however small it is."""
    stop_chances: tuple[float, ...] = STOP_CHANCES
    """How likely a process is stopped at an access to shared memory, at one pace or
    another."""
    server_steps: int = 1
    """How many times as likely a server is stopped at an access as a client."""
    copy_steps: int = 1
    """At how many steps a copy may be stopped before each piece of a block."""

    @classmethod
    def choose(cls, chance: random.Random) -> "SharingSettings":
        """Choose settings of one run."""
        return cls(
            clients=chance.choice([0, 0, 1, 2, 3, 4]),
            inline_bytes=chance.choice([0, 0, 0, 4096]),
            known_blocks=chance.choice([2, 65536, 65536]),
            asks_by_tcp=chance.random() < 0.3,
            asks_ahead=chance.random() < 0.8,
        )


class SharedHost(Plug):
    """The host of one server and of the clients that share its memory."""

    def __init__(self, settings: SharingSettings) -> None:
        self.settings = settings
        self.buggify: Buggify | None = None
        """What has clients do what they seldom do."""
        self._servers: dict[str, Process] = {}
        self._watches: dict[int, list[_Watch]] = {}
        self._cleanup = ExitStack()

    def start(self, world: World) -> None:
        """The world begins."""
        self.world = world
        self.processes = Processes(world.clock, world.generator("processes"), self.settings.stop_chances)
        self.network = UnixNetwork(world, _NETWORK, self.processes)
        self._random: random.Random = world.generator("host")
        self._tables = Tables(self.processes)
        trio.lowlevel.add_instrument(self.processes)
        self._cleanup.enter_context(mock.patch.object(shared_tables, "fence", self.processes.fence))
        self._cleanup.callback(self.network.close)

    def end(self) -> None:
        """The world ends."""
        self._cleanup.close()

    # Servers

    def environment(self, server: ServerNode, environment: Environment) -> Environment:
        """Return what a server that starts takes from its machine."""
        process = self._servers[server.name] = Process(server.name, self.settings.server_steps)
        self.processes.enter(process)
        return attrs.evolve(environment, create_arena=partial(self._tables.create_arena, process))

    def listeners(self, server: ServerNode) -> Sequence[Listener]:
        """Return the Unix socket of a server."""
        return (self.network.listen(server.name, SOCKET),)

    def movers(
        self, server: ServerNode, core: StoreCore, environment: Environment, resources: ExitStack
    ) -> Sequence[Mover]:
        """Return the shared memory mover of a server."""
        create_arena = environment.create_arena
        settings = server.settings
        removals = PublishedRemovals(settings.grows_to_bytes or settings.pool_bytes, settings.unit_bytes, create_arena)
        removals.watch(core)
        mover = ShmMover(
            _Liveness(self._hang_up),
            writable=settings.shm_writes,
            removals=removals,
            create_arena=create_arena,
            run_in_thread=environment.run_in_thread,
        )
        resources.callback(mover.close)
        return (mover,)

    def kill(self, server: ServerNode) -> None:
        """A server is killed."""
        self._servers[server.name].kill(quietly=True)
        for connection in self.network.of_node(server.name):
            connection.cut("the server has crashed")

    def _hang_up(self, pipe: int) -> None:
        for watch in self._watches.pop(pipe, []):
            self.world.clock.after(_NOTICED_WITHIN_S * self._random.random() ** 4, watch.hang_up)

    # Clients

    async def live(self, name: str, server: str, most_s: float, live: Callable[[Sharing], Awaitable[None]]) -> None:
        """Run a client as a process, which is killed after some seconds."""
        process = Process(name)
        share = partial(self._share, process, server)
        scope = trio.CancelScope()

        def kill() -> None:
            process.kill()
            self.network.end(process.name)
            scope.cancel()

        timer = None if most_s == math.inf else self.world.clock.after(most_s, kill)
        try:
            with scope:
                async with trio.open_nursery() as nursery:
                    self.processes.start_soon(nursery, process, live, share)
        except* Killed:
            pass
        finally:
            if timer is not None:
                timer.cancel()

    def _share(
        self, process: Process, server: str, environment: ClientEnvironment
    ) -> tuple[str, ClientEnvironment, dict[str, Any]]:
        """Return what a client opens its store with."""

        async def connect(address: StoreUrl) -> SimulatedStream:
            if address.path:
                assert address.path == SOCKET
                return await self.network.connect(process.name, server, SOCKET)
            assert environment.connect is not None
            stream: SimulatedStream = await environment.connect(address)
            return stream

        machine = Machine(
            map_memory=partial(self._tables.map_memory, process),
            watch_server=partial(_Watch, self._watches),
            make_copier=lambda _: Copier(self.processes, process, self._random, self.settings.copy_steps),
            start_thread=refuse_thread,
            spare_bytes=range(1 if self.settings.asks_ahead else 1 << 20, 1 << 24),
        )
        if self.buggify is not None:
            machine = buggified_machine(machine, self.buggify)
        settings = self.settings
        url = f"infinistore://{server}:1" if settings.asks_by_tcp else f"shm://{SOCKET}"
        options = {
            "inline_bytes": settings.inline_bytes,
            "known_blocks": settings.known_blocks,
        }
        return url, attrs.evolve(environment, connect=connect, machine=machine), options


class _Liveness(LivenessPipe):
    """A pipe of a server that tells when it hangs up."""

    def __init__(self, hung_up: Callable[[int], None]) -> None:
        super().__init__()
        self._file = os.fstat(self.share()).st_ino
        self._hung_up: Callable[[int], None] | None = hung_up

    def close(self) -> None:
        """Hang up."""
        super().close()
        if self._hung_up is not None:
            self._hung_up(self._file)
            self._hung_up = None


class _Watch(ServerWatch):
    """What a client learns of its server's end by, as `ServerWatch` without a thread.

    It may happen in the middle of anything that the client does, as in a thread.
    """

    def __init__(self, watches: "dict[int, list[_Watch]]", lifeline: int, ended: Callable[[], None]) -> None:
        self._lifeline = lifeline
        self._ended = ended
        self._is_closed = False
        watches.setdefault(os.fstat(lifeline).st_ino, []).append(self)

    def hang_up(self) -> None:
        """The server has ended."""
        if not self._is_closed:
            self._ended()

    def close(self) -> None:
        """Stop watching."""
        self._is_closed = True
        os.close(self._lifeline)

    def let_go(self) -> None:
        """Do as `close`: there is no thread."""
        self.close()
