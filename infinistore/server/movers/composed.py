"""The movers of a server, made of its settings: those of its one pool, or of the pool
of each trust group.
"""

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

from infinistore.config import ServerConfig
from infinistore.core.arena import Arena
from infinistore.core.store import StoreCore
from infinistore.core.tenants import Tenants
from infinistore.errors import ConfigError
from infinistore.server.environment import Environment
from infinistore.server.movers.base import Mover
from infinistore.server.movers.inline import InlineMover
from infinistore.server.movers.rdma import RdmaMover, open_rdma
from infinistore.server.movers.shm import LivenessPipe, PublishedRemovals, ShmMover
from infinistore.transports import Transport


def make_movers(
    config: ServerConfig,
    core: StoreCore,
    resources: ExitStack,
    *,
    tables: bool,
    transports: list[Transport],
    create_arena: Callable[..., Arena],
    run_in_thread: Callable[..., Awaitable[Any]],
) -> list[Mover]:
    """Make the movers of a server, in the order in which they may answer a request.
    Blocking.

    Those of other packages, `transports`, come first, and what is inline comes last.
    `resources` closes them. `tables` says whether clients on this host may read known
    blocks without asking.
    """
    movers: list[Mover] = []

    def add(mover: Mover) -> None:
        resources.callback(mover.close)
        movers.append(mover)

    for transport in transports:
        if transport.server_mover is not None:
            mover = transport.server_mover(config, core)
            if not isinstance(mover, Mover):
                raise ConfigError(f"the server_mover of the transport {transport.name!r} returned no Mover: {mover!r}")
            add(mover)
    removals = None
    if tables:
        pool_bytes = config.max_pool_bytes or config.prealloc_bytes
        removals = PublishedRemovals(pool_bytes, config.minimal_allocate_bytes, create_arena)
        removals.watch(core)
    add(
        ShmMover(
            LivenessPipe(),
            writable=config.shm_writes != "off",
            removals=removals,
            create_arena=create_arena,
            run_in_thread=run_in_thread,
        )
    )
    add(RdmaMover(open_rdma(config, core.pool)))
    add(InlineMover())
    return movers


def make_group_movers(
    config: ServerConfig,
    environment: Environment,
    resources: ExitStack,
    *,
    tenants: Tenants,
    mapped: bool,
    writable: bool,
    tables: bool,
) -> list[Mover]:
    """Make the movers of a trust group, in the order in which they may answer a
    request; none of other packages. Blocking. `resources` closes them.

    Clients map the pool if it is `mapped`, and write to it if it is `writable`;
    `tables` says whether they may read known blocks without asking.
    """
    removals = None
    if tables:
        pool_bytes = tenants.pool.capacity_bytes
        removals = PublishedRemovals(pool_bytes, config.minimal_allocate_bytes, environment.create_arena)
        removals.watch(tenants)
    shm = ShmMover(
        LivenessPipe(),
        writable=writable,
        mapped=mapped,
        removals=removals,
        create_arena=environment.create_arena,
        run_in_thread=environment.run_in_thread,
    )
    resources.callback(shm.close)
    rdma = RdmaMover(open_rdma(config, tenants.pool))
    resources.callback(rdma.close)
    return [shm, rdma, InlineMover()]
