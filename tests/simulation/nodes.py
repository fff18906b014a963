"""The nodes of a world: servers that start, crash and start again, and clients.

Both are the product as it is: `infinistore.server` composed with a simulated network,
and `infinistore.open_store` with streams of it. Each server has a clock of its own,
which is wrong by a rate and an offset. Clients measure only how long something takes:
one with a clock that is too fast is one with a shorter deadline.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import Any, TypeAlias

import attrs
import trio

import infinistore
from infinistore.access.policy import TenantPolicy
from infinistore.allocators import create_allocator
from infinistore.client.api.store import AsyncStore
from infinistore.client.extension import Environment as ClientEnvironment
from infinistore.client.options import StoreUrl
from infinistore.cluster.membership import Membership
from infinistore.config import ServerConfig
from infinistore.core import Arena, Journal, Pool, StoreCore, create_arena
from infinistore.core.limits import CoreLimits, Watermarks
from infinistore.server import Server, ServerAddresses
from infinistore.server.budgets import BODY_BUDGET_BYTES
from infinistore.server.composition import compose_server, join_cluster, open_disks, share_descriptors
from infinistore.server.environment import Environment
from infinistore.server.movers.inline import InlineMover
from infinistore.server.tenancy import Tenancy
from tests.simulation.buggify import Buggify, buggified
from tests.simulation.history import History, Life
from tests.simulation.network import Listener, Network, as_socket
from tests.simulation.streams import SimulatedStream
from tests.simulation.tenants import SimulatedTenants
from tests.simulation.world import World

__all__ = ["ClientNode", "ServerNode", "ServerSettings", "Sharing"]

_KIB = 1024

Sharing: TypeAlias = Callable[[ClientEnvironment], tuple[str, ClientEnvironment, dict[str, Any]]]
"""Returns the URL, the environment and the options of a client that shares memory with
its server, given its environment without that."""


@attrs.frozen
class ServerSettings:
    """How a server is set up. Sizes in bytes."""

    pool_bytes: int = 256 * _KIB
    unit_bytes: int = _KIB
    allocator: str = "bitmap"
    low: float = 0.8
    high: float = 0.95
    max_pinned_ratio: float = 0.5
    max_held_ratio: float = 0.25
    max_protected_ratio: float = 0.25
    max_batch_keys: int = 8192
    max_batch_bytes: int = 1024 * _KIB
    max_value_bytes: int = 64 * _KIB
    max_connections: int = 1024
    body_budget_bytes: int = BODY_BUDGET_BYTES
    read_ahead_bytes: int = 64 * _KIB
    expects_hazards: bool = False
    """Whether blocks without a key wait, as where clients read by themselves."""
    drain_timeout_s: float = 10.0
    periodic_evict: bool = False
    grows_to_bytes: int | None = None
    """How large its pool may get."""
    clock_rate: float = 1.0
    """How many seconds pass on its clock in one second."""
    clock_offset_s: float = 0.0
    shm_writes: bool = True
    unix_socket: str = "off"

    def config(self) -> ServerConfig:
        """Return the configuration of the server."""
        return ServerConfig(
            manage_port=None,
            unix_socket=self.unix_socket,
            shm_writes="on" if self.shm_writes else "off",
            prealloc_bytes=self.pool_bytes,
            minimal_allocate_bytes=self.unit_bytes,
            allocator=self.allocator,
            auto_increase=self.grows_to_bytes is not None,
            max_pool_bytes=self.grows_to_bytes,
            max_batch_keys=self.max_batch_keys,
            max_batch_bytes=self.max_batch_bytes,
            max_value_bytes=self.max_value_bytes,
            max_connections=self.max_connections,
            drain_timeout_s=self.drain_timeout_s,
            enable_periodic_evict=self.periodic_evict,
            evict_interval_s=0.5,
        )


class ServerNode:
    """A place where servers run, one after the other, each with empty memory."""

    def __init__(self, world: World, network: Network, history: History, name: str, settings: ServerSettings) -> None:
        self.world = world
        self.network = network
        self.history = history
        self.name = name
        self.settings = settings
        self.server: Server | None = None
        """The server that runs now."""
        self.serves = False
        """Whether its service has begun, and is not over."""
        self.buggify: Buggify | None = None
        """What has its servers do what they seldom do."""
        self.tenants: SimulatedTenants | None = None
        """The tenants of its servers, if they have some."""
        self._starts = 0
        self._restart_after_s: float | None = 0.0
        self._scope = trio.CancelScope()
        self._keeps_disk: bool | None = None

    @property
    def is_up(self) -> bool:
        """Whether a server runs, and is not about to end."""
        return self.server is not None and not self.server.draining and not self._scope.cancel_called

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run servers until `stop`."""
        self._restart_after_s = 0.0
        while self._restart_after_s is not None:
            await trio.sleep(self._restart_after_s)
            self._restart_after_s = None
            self._keeps_disk = None
            self._scope = trio.CancelScope()
            await self._run_one(task_status.started if not self._starts else lambda: None)
            self.world.trace.add(self.name, "ended", self._starts)
            if self._keeps_disk is not None:
                for plug in self.world.plugs:
                    plug.crash(self, keeps_disk=self._keeps_disk)
            self._reset_forgotten()

    def crash(self, restart_after_s: float, *, silently: bool = False, keeps_disk: bool = True) -> None:
        """End the server in the middle of whatever it does.

        If `silently`, its machine is gone: clients learn nothing before it is there
        again.
        """
        self.world.fault("CRASH_SILENTLY" if silently else "CRASH", self.name, self._starts)
        for plug in self.world.plugs:
            plug.kill(self)
        for connection in self.network.of_node(self.name):
            if silently:
                self.network.silence(connection)
            else:
                connection.cut("the server has crashed")
        self._note_end()
        self.history.lives[-1].crashed = True
        self._keeps_disk = keeps_disk
        self._restart_after_s = restart_after_s
        self._scope.cancel()

    def drain(self, restart_after_s: float) -> None:
        """Let the server end in an orderly way, and another one start."""
        assert self.server is not None
        self.world.fault("DRAIN", self.name, self._starts)
        self._restart_after_s = restart_after_s
        self.server.drain()

    def stop(self) -> None:
        """Let the server end in an orderly way, once and for all."""
        assert self.server is not None
        self._restart_after_s = None
        self.server.drain()

    def _reset_forgotten(self) -> None:
        """Let the ends of connections that this machine knows nothing of learn that,
        as soon as they send something.
        """
        for connection in self.network.of_node(self.name):
            if connection.is_silent:
                self.world.clock.after(1.0, partial(connection.cut, "the other end knows nothing of it"))

    async def _run_one(self, on_listening: Callable[[], None]) -> None:
        config = self.settings.config()
        self._starts += 1
        self.world.trace.add(self.name, "start", self._starts)
        self.history.lives.append(Life(self.world.clock.now))
        settings, clock = self.settings, self.world.clock
        environment = Environment(
            accept=_accept,
            random=self.world.generator(f"{self.name}/{self._starts}"),
            clock=lambda: settings.clock_offset_s + settings.clock_rate * clock.now,
            stopwatch=clock.current_time,
            body_budget_bytes=settings.body_budget_bytes,
            read_ahead_bytes=settings.read_ahead_bytes,
            run_in_thread=self.run_in_thread,
            create_arena=_create_arena,
        )
        plugs = self.world.plugs
        for plug in plugs:
            config = plug.config(self, config)
            environment = plug.environment(self, environment)
        if self.buggify is not None:
            environment = buggified(environment, self.buggify)
        with ExitStack() as resources:
            policy: TenantPolicy | None = None
            tenancy: Tenancy | None = None
            if self.tenants is None:
                pool = Pool(create_allocator(config.allocator, config.minimal_allocate_bytes))
                resources.callback(pool.close)
                pool.add_arena(environment.create_arena(0, config.prealloc_bytes))
                core = self._make_core(config, pool, environment)
            else:
                policy, tenancy = await self.tenants.open(
                    self.name, config, self._limits(config), environment, resources
                )
                core = tenancy.whole
            if settings.expects_hazards:
                core.expect_hazards()
            disks = await open_disks(config, core, environment, resources)
            listeners = [self.network.listen(self.name, self.name)]
            for plug in plugs:
                listeners += plug.listeners(self)
            for listener in listeners:
                resources.callback(listener.close)
            server = compose_server(
                config,
                core,
                ServerAddresses(((self.name, 0),), None if config.unix_socket == "off" else config.socket_path(0)),
                token="",
                environment=environment,
                movers=[
                    *(mover for plug in plugs for mover in plug.movers(self, core, environment, resources)),
                    InlineMover(),
                ],
                descriptors=share_descriptors(config),
                disks=disks,
                policy=policy,
                tenancy=tenancy,
            )
            if self.tenants is not None:
                await self.tenants.catch_up(server)
            self.server = server
            try:
                with self._scope:
                    await self._serve(config, environment, server, listeners, on_listening)
            finally:
                self._note_end()
                self.note_losses()
                self.server = None

    async def _serve(
        self,
        config: ServerConfig,
        environment: Environment,
        server: Server,
        listeners: list[Listener],
        on_listening: Callable[[], None],
    ) -> None:
        """Run a server until it has ended, in its cluster if it is in one."""

        async def serve(*may_serve: Callable[[], Awaitable[None]]) -> None:
            self.serves = True
            try:
                await server.run([as_socket(listener) for listener in listeners], on_listening, *may_serve)
            finally:
                self.serves = False

        cluster = join_cluster(config, server, environment, token="")
        if cluster is None:
            await serve()
            return
        refused = await cluster.run(partial(serve, cluster.may_serve))
        if refused is not None:
            self.world.violation(f"{self.name} ended: {refused.again()}")

    def _note_end(self) -> None:
        """Note that the memory of the server is lost. It may be in the middle of
        anything, so nothing is asked of it.
        """
        life = self.history.lives[-1]
        life.ended = min(life.ended, self.world.clock.now)

    def note_losses(self) -> None:
        """Note whether the server has evicted or dropped anything."""
        assert self.server is not None
        statistics = self.server.core.statistics()
        life = self.history.lives[-1]
        life.evicted = any(attrs.astuple(statistics.evicted))
        life.dropped = statistics.checksum_drops > 0
        if self.tenants is not None:
            self.tenants.note_losses(self.name, life)
        for plug in self.world.plugs:
            plug.note_losses(self)

    def _limits(self, config: ServerConfig) -> CoreLimits:
        return CoreLimits(
            max_key_bytes=config.max_key_bytes,
            max_value_bytes=config.max_value_bytes,
            max_batch_keys=config.max_batch_keys,
            max_pinned_ratio=self.settings.max_pinned_ratio,
            max_held_ratio=self.settings.max_held_ratio,
            max_protected_ratio=self.settings.max_protected_ratio,
        )

    def _make_core(self, config: ServerConfig, pool: Pool, environment: Environment) -> StoreCore:
        return environment.make_store(
            pool,
            clock=environment.clock,
            limits=self._limits(config),
            journal=Journal(reads=config.disk_admission == "second-use") if config.disks else None,
            watermarks=Watermarks(self.settings.low, self.settings.high),
            random=environment.random,
        )

    async def run_in_thread(self, work: Callable[..., Any], *args: Any) -> Any:
        """Do what a server would do in a thread: others go on meanwhile."""
        await trio.sleep(self.network.delay())
        return work(*args)


class ClientNode:
    """One life of a client of one server, over the network."""

    def __init__(
        self,
        network: Network,
        name: str,
        server: str,
        life: int,
        options: dict[str, Any],
        *,
        share: Sharing | None = None,
        membership: Membership | None = None,
    ) -> None:
        """With a membership, it is a client of that cluster, and `server` is not
        used.
        """
        self.network = network
        self.name = name
        self.server = server
        self.life = life
        self.options = options
        self._share = share
        self._membership = membership

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[AsyncStore, None]:
        """Open its store. It connects with the first call."""

        membership = self._membership

        async def connect(address: StoreUrl, *_: object) -> SimulatedStream:
            server = self.server if membership is None else address.host
            return await self.network.connect(self.name, server)

        random = self.network.world.generator(f"{self.name}/{self.life}")
        environment = ClientEnvironment(
            connect=connect, random=random, membership=None if membership is None else lambda _: membership
        )
        options: dict[str, Any] = {"name": self.name, "lazy": True, **self.options}
        url = f"tcp://{self.server}" if membership is None else "infinistore+static://what-the-world-says"
        if self._share is not None:
            url, environment, shared = self._share(environment)
            options |= shared
        async with infinistore.open_store(url, environment=environment, **options) as store:
            yield store


def _create_arena(index: int, length: int, **_: object) -> Arena:
    """Make an arena without the threads that touch its pages."""
    return create_arena(index, length)


async def _accept(listener: Any, *_: object) -> SimulatedStream:
    assert isinstance(listener, Listener)
    return await listener.accept()
