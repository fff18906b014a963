"""The movers of a server, made of its settings: those of its one pool, or of the pool
of each trust group. Making them blocks.
"""

from collections.abc import Iterable
from contextlib import ExitStack

from infinistore.config import ServerConfig
from infinistore.core.store import StoreCore
from infinistore.core.tenants import Tenants
from infinistore.errors import ConfigError
from infinistore.server.environment import Environment
from infinistore.server.movers.base import Mover
from infinistore.server.movers.inline import InlineMover
from infinistore.server.movers.rdma import RdmaMover, open_rdma
from infinistore.server.movers.shm import LivenessPipe, PublishedRemovals, ShmMover
from infinistore.transports import Transport


def make_movers_of_others(
    transports: Iterable[Transport], config: ServerConfig, core: StoreCore, resources: ExitStack
) -> list[Mover]:
    """Make the movers of other packages, the first ones. `resources` closes them."""
    movers: list[Mover] = []
    for transport in transports:
        if transport.server_mover is not None:
            mover = transport.server_mover(config, core)
            if not isinstance(mover, Mover):
                raise ConfigError(f"the server_mover of the transport {transport.name!r} returned no Mover: {mover!r}")
            resources.callback(mover.close)
            movers.append(mover)
    return movers


def make_movers(
    config: ServerConfig,
    store: StoreCore | Tenants,
    environment: Environment,
    resources: ExitStack,
    *,
    pool_bytes: int,
    mapped: bool = True,
    writable: bool,
    tables: bool,
) -> list[Mover]:
    """Make the movers of a store, or of a trust group, in the order in which they may
    answer a request: what is inline comes last. `resources` closes them.

    The pool can grow to `pool_bytes`. Clients map it if it is `mapped`, and write to it
    if it is `writable`; `tables` says whether those on this host may read known blocks
    without asking.
    """
    removals = None
    if tables:
        removals = PublishedRemovals(pool_bytes, config.minimal_allocate_bytes, environment.create_arena)
        removals.watch(store)
    shm = ShmMover(
        LivenessPipe(),
        writable=writable,
        mapped=mapped,
        removals=removals,
        create_arena=environment.create_arena,
        run_in_thread=environment.run_in_thread,
    )
    resources.callback(shm.close)
    rdma = RdmaMover(open_rdma(config, store.pool))
    resources.callback(rdma.close)
    return [shm, rdma, InlineMover()]
