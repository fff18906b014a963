"""The composition root: makes a server of its parts, and runs it.

`serve` is the public entry. `run_server` does the same for a caller that wants to reach
the parts. `compose_server` puts together what needs no waiting.

A server runs until it is cancelled or, if it handles signals, until SIGTERM or SIGINT.
Then it drains: it accepts no more connections, lets requests under way finish, and
leaves when they have, when the drain timeout is over, or at a second signal.
"""

import logging
import mmap
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Final, cast

import trio

from infinistore.allocators import create_allocator
from infinistore.config import ServerConfig
from infinistore.core.arena import Arena
from infinistore.core.journal import Journal
from infinistore.core.limits import CoreLimits
from infinistore.core.pool import Pool
from infinistore.core.store import StoreCore
from infinistore.errors import ConfigError, OutOfMemory
from infinistore.kept_errors import KeptError
from infinistore.machine_memory import free_huge_pages
from infinistore.protocol.messages import HelloReply
from infinistore.protocol.shards import Shard, shards_to_texts
from infinistore.server.budgets.descriptor_budget import DescriptorBudget
from infinistore.server.budgets.log_budget import LogBudget
from infinistore.server.buggified.machine import buggified, collide, make_body_budget
from infinistore.server.connection.conversation import SessionLimits
from infinistore.server.environment import Environment
from infinistore.server.listeners import Listeners, ServerAddresses, open_listeners
from infinistore.server.maintenance.growth import PoolGrowth
from infinistore.server.maintenance.periodic_eviction import evict_periodically
from infinistore.server.management.http import HttpLimits, serve_http
from infinistore.server.movers.base import Mover
from infinistore.server.movers.inline import InlineMover
from infinistore.server.movers.rdma.mover import RdmaMover
from infinistore.server.movers.rdma.pool import open_rdma
from infinistore.server.movers.shm.liveness_pipe import LivenessPipe
from infinistore.server.movers.shm.mover import ShmMover
from infinistore.server.movers.shm.removals import PublishedRemovals
from infinistore.server.security.loading import load_certificates
from infinistore.server.server import Server
from infinistore.server.session.context import ServerContext
from infinistore.server.session.handshake import MOST_STRANGERS, Handshakes
from infinistore.server.session_registry import SessionRegistry
from infinistore.server.statistics.recorder import Recorder
from infinistore.server.telemetry import Telemetry
from infinistore.service_manager import ServiceManager
from infinistore.token_file import read_token
from infinistore.transports.sockets.spin import DEFAULT_SPIN_S, Spinner
from infinistore.version import __version__

if TYPE_CHECKING:
    from infinistore.server.cluster.service import ClusterService
    from infinistore.server.disk.service import DiskService
    from infinistore.server.management.api import Management
    from infinistore.server.security.certificates import Certificates

__all__ = ["MAX_BODY_BYTES", "compose_server", "make_core", "open_disks", "run_server", "serve"]

_log = logging.getLogger("infinistore.server")
MAX_BODY_BYTES: Final = 64 * 1024 * 1024
"""The longest body of a request."""
_DISKS_END_S: Final = 5.0
"""How long jobs of disks that were begun are waited for at the end."""


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
    await run_server(
        config or ServerConfig(),
        handle_signals=handle_signals,
        environment=Environment(
            open_listeners=partial(open_listeners, given=manager.listeners), service_manager=manager
        ),
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
    if config.shards > 1:
        raise ConfigError(f"--shards {config.shards}: this is one process; start the command infinistore for more")
    environment = buggified(environment or Environment())
    refused: KeptError | None = None
    with ExitStack() as resources:
        token = read_token(config.token_file) if config.token_file else ""
        tls = load_certificates(config)
        # Listen before taking memory: a port in use is known at once. Connections wait
        # until the pool is there.
        listeners = environment.open_listeners(config, resources)
        pool = Pool(create_allocator(config.allocator, config.minimal_allocate_bytes))
        resources.callback(pool.close)
        async with trio.open_nursery() as nursery:
            try:
                descriptors = share_descriptors(config)
                management = _start_management(config, token, listeners, nursery, tls=tls, descriptors=descriptors)
                shards = await environment.meet_shards(listeners.addresses)
                make_arena = partial(_make_arena, config, environment)
                pool.add_arena(await environment.run_in_thread(make_arena, 0, config.prealloc_bytes))
                core = make_core(config, pool, environment)
                disk = await open_disks(config, core, environment, resources)
                addresses = listeners.addresses
                make_movers = partial(_make_movers, config, core, addresses, environment, resources)
                movers = await environment.run_in_thread(make_movers)
                server = compose_server(
                    config,
                    core,
                    addresses,
                    token,
                    environment=environment,
                    movers=movers,
                    descriptors=descriptors,
                    disk=disk,
                    shards=shards,
                    tls=tls,
                )
                cluster = _join_cluster(config, server, environment, token)
            except (OutOfMemory, ConfigError) as error:
                refused = KeptError(error)  # raised outside of the nursery, which would wrap it in a group
            else:
                if management is not None:
                    management.server = server
                if handle_signals:
                    if tls is not None:
                        await nursery.start(partial(tls.reload_on_signal, service_manager=environment.service_manager))
                    await nursery.start(_drain_on_signal, server, nursery.cancel_scope)
                nursery.start_soon(_tell_of_drain, server, environment.service_manager)
                serve = partial(server.run, listeners.clients, lambda: on_listening(server))
                if cluster is None:
                    await serve()
                else:
                    refused = await cluster.run(partial(serve, cluster.may_serve))
            nursery.cancel_scope.cancel()
    if refused is not None:
        raise refused.again()


def _join_cluster(
    config: ServerConfig, server: Server, environment: Environment, token: str
) -> "ClusterService | None":
    if config.cluster is None:
        return None
    from infinistore.server.cluster.service import ClusterService  # late: most servers are in none

    service = ClusterService(config, server, environment, token)
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
    disk: "DiskService | None" = None,
    shards: Sequence[Shard] = (),
    tls: "Certificates | None" = None,
) -> Server:
    """Put a server together. The store, its movers and the addresses are there already,
    and the environment is `buggified` if it is to be. `shards` are those that it is one
    of.
    """
    collide(core, environment)
    growth = _make_growth(config, core, environment, movers)
    hello = HelloReply(
        instance=f"{environment.random.getrandbits(128):032x}",
        server_version=__version__,
        max_body_bytes=MAX_BODY_BYTES,
        max_batch_keys=config.max_batch_keys,
        max_batch_bytes=config.max_batch_bytes,
        max_value_bytes=config.max_value_bytes,
        unix_socket=str(addresses.unix_socket or ""),
        shards=shards_to_texts(shards),
    )
    for mover in movers:
        hello = mover.announce(hello)
    limits = SessionLimits(
        max_body_bytes=MAX_BODY_BYTES,
        max_payload_bytes=max(config.max_batch_bytes, config.max_value_bytes) + 8 * config.max_batch_keys,
        read_ahead_bytes=environment.read_ahead_bytes,
    )
    sessions = _make_registry(config, descriptors, each=1 + max(mover.descriptors_per_client for mover in movers))
    recorder, log_budget = Recorder(environment.stopwatch), LogBudget()
    spinner = Spinner(DEFAULT_SPIN_S if config.spin_us is None else config.spin_us * 1e-6, environment.stopwatch)
    handshakes = Handshakes(limits, token, log_budget, places=descriptors.strangers)
    telemetry = Telemetry(
        hello.instance,
        core,
        sessions,
        handshakes=handshakes,
        recorder=recorder,
        spinner=spinner,
        disk=None if disk is None else disk.statistics,
    )
    context = ServerContext(
        core=core,
        hello=hello,
        limits=limits,
        statistics=telemetry.tree,
        movers=movers,
        growth=growth,
        disk=disk,
        recorder=recorder,
        log_budget=log_budget,
        body_budget=make_body_budget(environment),
    )
    return Server(
        context,
        addresses,
        sessions=sessions,
        handshakes=handshakes,
        telemetry=telemetry,
        spinner=spinner,
        environment=environment,
        background=_background(config, core, growth),
        drain_timeout_s=config.drain_timeout_s,
        tls=tls,
    )


async def open_disks(
    config: ServerConfig, core: StoreCore, environment: Environment, resources: ExitStack
) -> "DiskService | None":
    """Open the disks that the configuration names; `resources` closes them.

    Raises:
        ConfigError: a disk cannot be used. Nothing on it was changed.
    """
    if not config.disks:
        return None
    from infinistore.disk.settings import Admission, TierSettings
    from infinistore.server.disk.service import DiskService

    disks = await environment.run_in_thread(environment.open_disks, config.disks, environment.random)
    resources.callback(disks.runner.close, timeout_s=_DISKS_END_S)
    settings = TierSettings(admission=cast("Admission", config.disk_admission), wait_s=config.disk_wait_s)
    return DiskService(disks, core, clock=environment.clock, random=environment.random, settings=settings)


def make_core(config: ServerConfig, pool: Pool, environment: Environment) -> StoreCore:
    """Make the store of a server."""
    limits = CoreLimits(
        max_key_bytes=config.max_key_bytes,
        max_value_bytes=config.max_value_bytes,
        max_batch_keys=config.max_batch_keys,
    )
    journal = Journal(reads=config.disk_admission == "second-use") if config.disks else None
    clock, random, buggify = environment.clock, environment.random, environment.buggify
    return StoreCore(pool, clock=clock, limits=limits, random=random, journal=journal, buggify=buggify)


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

    def make_arena(index: int, length: int) -> Arena:
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
        make_arena=make_arena,
        run_in_thread=environment.run_in_thread,
    )


def _background(
    config: ServerConfig, core: StoreCore, growth: PoolGrowth | None
) -> list[Callable[[], Awaitable[None]]]:
    tasks: list[Callable[[], Awaitable[None]]] = []
    if growth is not None:
        tasks.append(growth.run)
    if config.enable_periodic_evict:
        low, high = config.evict_min_threshold, config.evict_max_threshold
        tasks.append(partial(evict_periodically, core, config.evict_interval_s, low, high))
    return tasks


def _make_arena(config: ServerConfig, environment: Environment, index: int, length: int) -> Arena:
    threads = os.cpu_count() or 1
    return environment.create_arena(index, length, huge_pages=config.huge_pages, prefault_threads=threads)


def _make_movers(
    config: ServerConfig, core: StoreCore, addresses: ServerAddresses, environment: Environment, resources: ExitStack
) -> list[Mover]:
    """Make the movers of a server, in the order in which they may answer a request.
    Blocking.

    Those of other packages come first, and what is inline comes last. `resources`
    closes them.
    """
    movers: list[Mover] = []

    def add(mover: Mover) -> None:
        resources.callback(mover.close)
        movers.append(mover)

    for transport in environment.installed_transports():
        if transport.server_mover is not None:
            mover = transport.server_mover(config, core)
            if not isinstance(mover, Mover):
                raise ConfigError(f"the server_mover of the transport {transport.name!r} returned no Mover: {mover!r}")
            add(mover)
    removals = _make_removals(config, core, addresses, environment)
    writable = config.shm_writes == "on"
    add(
        ShmMover(
            LivenessPipe(),
            writable=writable,
            removals=removals,
            create_arena=environment.create_arena,
            run_in_thread=environment.run_in_thread,
        )
    )
    add(RdmaMover(open_rdma(config, core.pool)))
    add(InlineMover())
    return movers


def _make_removals(
    config: ServerConfig, core: StoreCore, addresses: ServerAddresses, environment: Environment
) -> PublishedRemovals | None:
    """Make what lets clients on this host read known blocks without asking, if any can
    connect.
    """
    if addresses.unix_socket is None or not environment.tables_are_safe():
        return None
    pool_bytes = config.max_pool_bytes or config.prealloc_bytes
    removals = PublishedRemovals(pool_bytes, config.minimal_allocate_bytes, environment.create_arena)
    removals.watch(core)
    return removals


def _start_management(
    config: ServerConfig,
    token: str,
    listeners: Listeners,
    nursery: trio.Nursery,
    *,
    tls: "Certificates | None",
    descriptors: DescriptorBudget,
) -> "Management | None":
    if not (found := listeners.management):
        return None
    from infinistore.server.management import api  # late: an embedding that has none does not pay for it

    management = api.Management(config, token)
    limits = HttpLimits(connections=descriptors.management, probes=api.PROBES)
    secure = None if tls is None or found[0].family == socket.AF_UNIX else tls.secure_management
    nursery.start_soon(serve_http, management.application(), found, limits, secure)
    return management


async def _tell_of_drain(server: Server, manager: ServiceManager) -> None:
    await server.drain_begun()
    manager.stopping()


async def _drain_on_signal(server: Server, everything: trio.CancelScope, *, task_status: trio.TaskStatus[None]) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for number in signals:
            name = signal.Signals(number).name
            if server.draining:
                _log.info("not waiting for requests under way", extra={"signal": name})
                everything.cancel()
            _log.info("draining", extra={"signal": name, "at_most_s": server.drain_timeout_s})
            server.drain()
