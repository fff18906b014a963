"""Makes the movers of a trust group's pool."""

from contextlib import ExitStack

from infinistore.config import ServerConfig
from infinistore.core.tenants import Tenants
from infinistore.server.environment import Environment
from infinistore.server.movers.base import Mover
from infinistore.server.movers.inline import InlineMover
from infinistore.server.movers.rdma import RdmaMover, open_rdma
from infinistore.server.movers.shm import LivenessPipe, PublishedRemovals, ShmMover

__all__ = ["make_group_movers"]


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
