"""The composition root: makes a server of its parts, and runs it.

`serve` is the public entry. `run_server` does the same for a caller that wants to reach
the parts. `compose_server` puts together what needs no waiting. What keeps the blocks
is made before: one store, or those of tenants in pools of their own.

A server runs until it is cancelled or, if it handles signals, until SIGTERM or SIGINT.
Then it drains: it accepts no more connections, lets requests under way finish, and
leaves when they have, when the drain timeout is over, or at a second signal.
"""

import logging
import mmap
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

import attrs
import trio

from infinistore.access.policy import OneTenant, Policy, TenantPolicy
from infinistore.allocators import create_allocator
from infinistore.config import ServerConfig, default_pool_bytes
from infinistore.core.arena import Arena
from infinistore.core.index import BYTES_PER_KEY
from infinistore.core.limits import CoreLimits
from infinistore.core.pool import Pool
from infinistore.core.store import StoreCore
from infinistore.disk.tiers import Tiers
from infinistore.disk_settings import DESCRIPTORS_OF_A_DISK
from infinistore.errors import ConfigError, OutOfMemory
from infinistore.eviction import eviction_class
from infinistore.host import MemoryLimit, check_server_runs_here, free_huge_pages
from infinistore.kept_errors import KeptError
from infinistore.protocol.messages import HelloReply, Keys, Shard
from infinistore.secret_files import read_token
from infinistore.server.budgets import DescriptorBudget, LogBudget
from infinistore.server.connection import SessionLimits
from infinistore.server.disk import JOBS_END_S, DiskService, ServerDisks, make_journal
from infinistore.server.environment import Environment
from infinistore.server.listeners import Listeners, ServerAddresses, open_listeners
from infinistore.server.maintenance import PoolGrowth, SizeAdvice, evict_periodically
from infinistore.server.management.http import HttpLimits, serve_http
from infinistore.server.movers.base import Mover
from infinistore.server.movers.composed import make_movers, make_movers_of_others
from infinistore.server.recorder import Recorder
from infinistore.server.security import Reloads, add_tenants, load_certificates, load_policy, reload_on_signal
from infinistore.server.server import Server
from infinistore.server.session.handshake import MOST_STRANGERS, Handshakes
from infinistore.server.session.session import ServerContext, SessionRegistry
from infinistore.server.take_over.giving import HandoverServer
from infinistore.server.take_over.kept import Keeping, KeptMemory, forget_kept, make_keeping, open_kept
from infinistore.server.take_over.memory import OneStore, PoolLost
from infinistore.server.take_over.taking import HandoverClient, begin_taking
from infinistore.server.telemetry import Telemetry
from infinistore.service_manager import ServiceManager
from infinistore.sizes import DefaultSize
from infinistore.tenant_limits import why_no_places
from infinistore.transports.sockets.spin import Spinner
from infinistore.version import __version__

if TYPE_CHECKING:
    from infinistore.server.certificates import Certificates
    from infinistore.server.cluster import ClusterService
    from infinistore.server.management.api import Management
    from infinistore.server.tenancy import Tenancy

_log = logging.getLogger("infinistore.server")
MAX_BODY_BYTES: Final = 64 * 1024 * 1024
"""The longest body of a request."""
_Background: TypeAlias = Callable[[], Awaitable[None]]


async def serve(
    config: ServerConfig | None = None,
    *,
    handle_signals: bool = False,
    service_manager: ServiceManager | None = None,
    task_status: trio.TaskStatus[ServerAddresses] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a server until it is cancelled; with `handle_signals` (main thread only) also
    until SIGTERM or SIGINT. It listens on the sockets of `service_manager`, and tells
    it when it drains.

    Started in a nursery by `await nursery.start(serve, config)`, it gives a
    `ServerAddresses` once it listens.

    Raises:
        ConfigError: an address, a port or a path that cannot be used; or no RDMA where
            it is required.
        OutOfMemory: the machine has no memory for the pool.
    """
    manager = service_manager or ServiceManager()

    def listen(config: ServerConfig, resources: ExitStack, given: Sequence[socket.socket] = ()) -> Listeners:
        return open_listeners(config, resources, given=given or [sock.dup() for sock in manager.listeners])

    with ExitStack() as resources:
        for sock in manager.listeners:
            resources.enter_context(sock)
        await run_server(
            config or ServerConfig(),
            handle_signals=handle_signals,
            environment=Environment(open_listeners=listen, service_manager=manager),
            on_listening=lambda server: task_status.started(server.addresses),
        )


async def run_server(
    config: ServerConfig,
    *,
    handle_signals: bool = False,
    environment: Environment | None = None,
    on_listening: Callable[[Server], None],
) -> None:
    """Run a server as `serve` does, and pass it to `on_listening` once it listens.

    Raises:
        ConfigError: an address, a port or a path that cannot be used; or no RDMA where
            it is required.
        OutOfMemory: the machine has no memory for the pool.
    """
    check_server_runs_here()
    if config.shards > 1:
        raise ConfigError(f"--shards {config.shards}: this is one process; start the command infinistore for more")
    environment = environment or Environment()
    manager = environment.service_manager
    if config.take_over:
        await environment.run_in_thread(forget_kept, manager)
    if config.take_over or manager.kept:
        try:
            await _run(config, handle_signals, environment, on_listening)
        except PoolLost as error:
            if environment.must_go_on:
                raise ConfigError(f"--take-over: {error}") from None
            _log.warning("the cache starts empty", extra={"reason": str(error)})
        else:
            return
        await environment.run_in_thread(forget_kept, manager)  # first, so that its memory is free
    if isinstance(config.prealloc_bytes, DefaultSize):
        config = attrs.evolve(config, prealloc_bytes=default_pool_bytes())
    await _run(attrs.evolve(config, take_over=False), handle_signals, environment, on_listening)


async def _run(
    config: ServerConfig, handle_signals: bool, environment: Environment, on_listening: Callable[[Server], None]
) -> None:
    refused: KeptError | None = None
    with ExitStack() as resources:
        giving = resources.enter_context(closing(HandoverServer()))  # first, to be closed last
        token = read_token(config.token_file) if config.token_file else ""
        policy = load_policy(config, token)
        tls, reloads = load_certificates(config, policy.audit), Reloads()
        if tls is not None:
            reloads.add(tls.reload_and_log)
        manager = environment.service_manager
        taking = await _find_earlier(config, token, environment, resources)
        if taking is not None:
            config = taking.config
        # Listen before taking memory: a port in use is known at once. Connections wait
        # until the pool is there.
        listeners = (taking or environment).open_listeners(config, resources)
        giving.listeners = listeners
        pool = Pool(create_allocator(config.allocator, config.minimal_allocate_bytes))
        resources.callback(pool.close)
        async with trio.open_nursery() as nursery:
            if handle_signals:
                await nursery.start(reload_on_signal, reloads, manager)
            try:
                descriptors = share_descriptors(config)
                manage = partial(
                    _start_management, config, policy, listeners, nursery, tls=tls, descriptors=descriptors
                )
                # Until then the other server's answers, as long as it serves.
                management = None if taking is not None and taking.serves else manage()
                shards = await environment.meet_shards(listeners.addresses)
                giving.refuse(shards=bool(shards))
                addresses = attrs.evolve(listeners.addresses, pool_bytes=config.prealloc_bytes)
                opening = _Opening(
                    config, addresses, environment, resources, descriptors, taking, parts=len(shards) or 1
                )
                stores = await opening.open(policy, pool)
                server = compose_server(
                    config,
                    stores.core,
                    addresses,
                    token,
                    environment=environment,
                    movers=stores.movers,
                    descriptors=descriptors,
                    disks=stores.disks,
                    shards=shards,
                    tls=tls,
                    reloads=reloads,
                    policy=policy,
                    giving=giving,
                    keeping=make_keeping(config, manager, giving),
                    background=stores.background,
                    tenancy=stores.tenancy,
                )
                cluster = join_cluster(config, server, environment, token, has_old_blocks=taking is not None)
                if taking is not None:
                    await taking.end()
                    giving.inherited = taking.still_open
                    management = management or manage()
            except (OutOfMemory, ConfigError, PoolLost) as error:
                refused = KeptError(error)  # raised outside of the nursery, which would wrap it in a group
            else:
                if management is not None:
                    management.server = server
                if handle_signals:
                    await nursery.start(server.drain_on_signal, nursery.cancel_scope)
                nursery.start_soon(_tell_of_drain, server, manager)
                serve = partial(server.run, listeners.clients, lambda: on_listening(server))
                if cluster is None:
                    await serve()
                else:
                    refused = await cluster.run(partial(serve, cluster.may_serve))
            nursery.cancel_scope.cancel()
    if refused is not None:
        raise refused.again()


_Earlier: TypeAlias = HandoverClient | KeptMemory | None
"""The server that this one goes on for, if there is one."""


async def _find_earlier(config: ServerConfig, token: str, environment: Environment, resources: ExitStack) -> _Earlier:
    if config.take_over:
        return await begin_taking(config, token, resources)
    manager = environment.service_manager
    return await open_kept(config, manager, environment.open_listeners, resources) if manager.kept else None


@attrs.frozen
class _Stores:
    """The store of a server, its movers, disks, background tasks and tenants."""

    core: StoreCore
    movers: Sequence[Mover]
    disks: ServerDisks
    background: Sequence[_Background]
    tenancy: "Tenancy | None" = None


@attrs.frozen
class _Opening:
    """Makes the stores of a server, one of `parts`, with `earlier` blocks if any."""

    config: ServerConfig
    addresses: ServerAddresses
    environment: Environment
    resources: ExitStack
    descriptors: DescriptorBudget
    earlier: _Earlier
    parts: int

    async def open(self, policy: Policy, pool: Pool) -> _Stores:
        """Make the store in `pool`, or those of tenants, and wait until it may be used.

        Raises:
            ConfigError: the configuration, or the tenants file, cannot be used.
            OutOfMemory: the machine has no memory for the pool.
            PoolLost: the blocks of the earlier server cannot be used, and it has ended.
        """
        try:
            if isinstance(policy, TenantPolicy):
                stores = await self._open_tenants(policy)
            else:
                stores = await self._open_one(pool)
        except OutOfMemory as error:
            if self.earlier is None or self.earlier.serves:
                raise
            raise PoolLost(str(error)) from None  # without what it has left, there may be enough
        _warn_of_index(self.config, self.environment.available_memory())
        await self.environment.may_serve()
        return stores

    async def _open_one(self, pool: Pool) -> _Stores:
        config, environment, earlier = self.config, self.environment, self.earlier
        make_arena, background = partial(_make_arena, config, environment), list[_Background]()
        if earlier is None:
            pool.add_arena(await environment.run_in_thread(make_arena, 0, config.prealloc_bytes))
        else:
            try:
                await earlier.add_arenas(pool, make_arena, environment.run_in_thread, size_bytes=config.prealloc_bytes)
            except ValueError as error:
                raise earlier.unusable(str(error)) from None
        core = make_core(config, pool, environment)
        movers = await environment.run_in_thread(self._make_movers, core)
        if earlier is not None:
            background = await earlier.take(OneStore(core), self.resources)
        self.descriptors.reserve(len(config.disks) * DESCRIPTORS_OF_A_DISK)
        return _Stores(core, movers, await open_disks(config, core, environment, self.resources), background)

    def _make_movers(self, core: StoreCore) -> list[Mover]:
        config, environment, resources = self.config, self.environment, self.resources
        others = make_movers_of_others(environment.installed_transports(), config, core, resources)
        own = make_movers(
            config,
            core,
            environment,
            resources,
            pool_bytes=config.max_pool_bytes or config.prealloc_bytes,
            writable=config.shm_writes != "off",
            tables=self._tables,
        )
        return [*others, *own]

    @property
    def _tables(self) -> bool:
        """Whether clients that map a pool may read known blocks without asking."""
        return self.addresses.unix_socket is not None and self.environment.tables_are_safe()

    async def _open_tenants(self, policy: TenantPolicy) -> _Stores:
        from infinistore.server.tenancy import open_groups  # late: most servers have no tenants

        config, environment, resources = self.config, self.environment, self.resources
        tenancy = await open_groups(
            config,
            policy.tenants,
            _core_limits(config),
            environment,
            resources,
            make_arena=partial(_make_arena, config, environment),
            tables=self._tables,
            parts=self.parts,
            taking=self.earlier,
        )
        background = [] if self.earlier is None else await self.earlier.take(tenancy.handed, resources)
        if config.disks:
            from infinistore.server.tenant_disks import open_tenant_disks  # late: it needs numpy

            limits = [one.divided(self.parts) for one in policy.tenants.limits]
            await open_tenant_disks(
                config, limits, tenancy, environment, resources, reserve_descriptors=self.descriptors.reserve
            )
        return _Stores(tenancy.whole, tenancy.movers, tenancy.disks, background, tenancy)


async def open_disks(
    config: ServerConfig, core: StoreCore, environment: Environment, resources: ExitStack
) -> ServerDisks:
    """Open the disks that the configuration names; `resources` closes them.

    Raises:
        ConfigError: a disk cannot be used. Nothing on it was changed.
    """
    if not config.disks:
        return ServerDisks(Tiers(core))
    opened = await environment.run_in_thread(environment.open_disks, config.disks, environment.random)
    resources.callback(opened.runner.close, timeout_s=JOBS_END_S)
    service = DiskService(opened, core, config, environment)
    disks = ServerDisks(service.tiers)
    disks.add(service)
    return disks


def make_core(config: ServerConfig, pool: Pool, environment: Environment) -> StoreCore:
    """Make the store of a server."""
    journal = make_journal(config) if config.disks else None
    return environment.make_store(
        pool,
        clock=environment.clock,
        limits=_core_limits(config),
        random=environment.random,
        journal=journal,
        eviction=eviction_class(config.eviction),
    )


def _warn_of_index(config: ServerConfig, limit: MemoryLimit) -> None:
    """Warn if a pool full of the smallest blocks would need an index for which there is
    no memory.
    """
    keys = config.prealloc_bytes // config.minimal_allocate_bytes
    if keys * BYTES_PER_KEY > limit.available_bytes:
        _log.warning(
            "the index of keys may outgrow the memory",
            extra={
                "keys": keys,
                "index_bytes": keys * BYTES_PER_KEY,
                "available_bytes": limit.available_bytes,
                "source": limit.source,
                "remedy": "a larger --minimal-allocate-size, or a smaller --prealloc-size",
            },
        )


def _core_limits(config: ServerConfig) -> CoreLimits:
    return CoreLimits(
        max_key_bytes=config.max_key_bytes,
        max_value_bytes=config.max_value_bytes,
        max_batch_keys=config.max_batch_keys,
        max_protected_ratio=config.max_protected_ratio,
    )


def _make_arena(config: ServerConfig, environment: Environment, index: int, length: int) -> Arena:
    """Make an arena as the configuration says. Blocking."""
    return environment.create_arena(
        index,
        length,
        huge_pages=config.huge_pages,
        prefault_threads=os.cpu_count() or 1,
        numa_node=config.numa_node,
    )


def join_cluster(
    config: ServerConfig, server: Server, environment: Environment, token: str, *, has_old_blocks: bool = False
) -> "ClusterService | None":
    """Return the server's part in its cluster, if it has one."""
    if config.cluster is None:
        return None
    from infinistore.server.cluster import ClusterService  # late: most servers are in none

    service = ClusterService(config, server, environment, token, has_old_blocks=has_old_blocks)
    server.telemetry.cluster = service.statistics
    return service


def compose_server(
    config: ServerConfig,
    core: StoreCore,
    addresses: ServerAddresses,
    token: str,
    *,
    environment: Environment,
    movers: Sequence[Mover],
    descriptors: DescriptorBudget,
    disks: ServerDisks,
    shards: Sequence[Shard] = (),
    tls: "Certificates | None" = None,
    reloads: Reloads | None = None,
    policy: Policy | None = None,
    giving: HandoverServer | None = None,
    keeping: Keeping | None = None,
    background: Sequence[_Background] = (),
    tenancy: "Tenancy | None" = None,
) -> Server:
    """Put a server together from its parts. `shards` are those that it is one of."""
    growth = _make_growth(config, core, environment, movers)
    core.index.reuse.on_wanted = SizeAdvice(core.pool).tell
    hello = HelloReply(
        instance=f"{environment.random.getrandbits(128):032x}",
        server_version=__version__,
        max_body_bytes=MAX_BODY_BYTES,
        max_batch_keys=config.max_batch_keys,
        max_batch_bytes=config.max_batch_bytes,
        max_value_bytes=config.max_value_bytes,
        unix_socket=str(addresses.unix_socket or ""),
        shards=Keys([str(shard) for shard in shards]),
    )
    for mover in movers:
        hello = mover.announce(hello)
    limits = SessionLimits(
        max_body_bytes=MAX_BODY_BYTES,
        max_payload_bytes=max(config.max_batch_bytes, config.max_value_bytes) + 8 * config.max_batch_keys,
        max_batch_keys=config.max_batch_keys,
        read_ahead_bytes=environment.read_ahead_bytes,
    )
    sessions = _make_registry(config, descriptors, each=1 + max(mover.descriptors_per_client for mover in movers))
    recorder, log_budget = Recorder(environment.stopwatch), LogBudget()
    spinner = Spinner(config.spin_us, environment.stopwatch)
    policy, unix_access = policy or OneTenant(token), addresses.unix_access
    handshakes = Handshakes(limits, policy, log_budget, places=descriptors.strangers, unix_access=unix_access)
    telemetry = Telemetry(
        hello.instance,
        core,
        sessions,
        handshakes=handshakes,
        recorder=recorder,
        spinner=spinner,
        disk=disks.statistics,
    )
    if tenancy is not None:
        if problem := why_no_places(len(tenancy), sessions.most):
            raise ConfigError(problem)
        tenancy.figures = telemetry.tenant_tree
        telemetry.tenants = tenancy.statistics
    if giving is not None:
        giving.whole = OneStore(core) if tenancy is None else tenancy.handed
    context = ServerContext(
        tiers=disks.whole,
        hello=hello,
        limits=limits,
        statistics=telemetry.tree,
        movers=movers,
        growth=growth,
        disks=disks,
        recorder=recorder,
        log_budget=log_budget,
        body_budget=environment.make_body_budget(environment.body_budget_bytes),
        giving=giving,
        keeping=keeping,
    )
    reloads = reloads or Reloads()
    server = Server(
        context,
        addresses,
        sessions=sessions,
        handshakes=handshakes,
        telemetry=telemetry,
        spinner=spinner,
        environment=environment,
        background=[*_background(config, core, growth), *background],
        drain_timeout_s=config.drain_timeout_s,
        tls=tls,
        reloads=reloads,
        tenancy=tenancy,
    )
    add_tenants(reloads, config, handshakes.policy, server)
    return server


def share_descriptors(config: ServerConfig) -> DescriptorBudget:
    """Share out the descriptors that this process may open.

    Raises:
        ConfigError: the process may open too few to serve anybody.
    """
    return DescriptorBudget(
        clients=config.max_connections,
        strangers=MOST_STRANGERS,
        management=0 if config.manage_port is None else HttpLimits().connections,
        arenas=(config.max_pool_bytes or 0) // config.prealloc_bytes if config.auto_increase else 0,
    )


def _make_registry(config: ServerConfig, descriptors: DescriptorBudget, *, each: int) -> SessionRegistry:
    most = descriptors.clients(each=each)
    if most == config.max_connections:
        return SessionRegistry(most, "close some, or raise --max-connections")
    _log.warning("fewer connections than --max-connections", extra={"connections": most, "reason": str(descriptors)})
    return SessionRegistry(most, str(descriptors))


def _make_growth(
    config: ServerConfig, core: StoreCore, environment: Environment, movers: Sequence[Mover]
) -> PoolGrowth | None:
    if not config.auto_increase:
        return None

    def add_to_movers(index: int, length: int) -> Arena:
        arena = _make_arena(config, environment, index, length)
        try:
            for mover in movers:
                mover.add_arena(arena)
        except BaseException:
            arena.close()
            raise
        return arena

    most = config.max_pool_bytes
    if most is None:
        most = core.pool.capacity_bytes + environment.available_memory().available_bytes
    return PoolGrowth(
        core,
        max_capacity_bytes=most,
        step_bytes=config.prealloc_bytes,
        page_bytes=free_huge_pages()[1] if config.huge_pages else mmap.PAGESIZE,
        make_arena=add_to_movers,
        run_in_thread=environment.run_in_thread,
    )


def _background(config: ServerConfig, core: StoreCore, growth: PoolGrowth | None) -> list[_Background]:
    tasks: list[_Background] = []
    if growth is not None:
        tasks.append(growth.run)
    if config.enable_periodic_evict:
        low, high = config.evict_min_threshold, config.evict_max_threshold
        tasks.append(partial(evict_periodically, core, config.evict_interval_s, low, high))
    return tasks


def _start_management(
    config: ServerConfig,
    policy: Policy,
    listeners: Listeners,
    nursery: trio.Nursery,
    *,
    tls: "Certificates | None",
    descriptors: DescriptorBudget,
) -> "Management | None":
    if not (found := listeners.management):
        return None
    from infinistore.server.management import api, operations  # late: an embedding that has none does not pay for it

    management = api.Management(config, policy)
    limits = HttpLimits(connections=descriptors.management, probes=operations.PROBES)
    secure = None if tls is None or found[0].family == socket.AF_UNIX else tls.secure_management
    nursery.start_soon(serve_http, management.application(), found, limits, secure)
    return management


async def _tell_of_drain(server: Server, manager: ServiceManager) -> None:
    await server.drain_begun()
    manager.stopping()
