"""Makes what keeps a server's blocks: one store, or those of tenants in pools of their
own.
"""

import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from infinistore.access.policy import Policy, TenantPolicy
from infinistore.config import ServerConfig
from infinistore.core.arena import Arena
from infinistore.core.journal import Journal
from infinistore.core.limits import CoreLimits
from infinistore.core.pool import Pool
from infinistore.core.store import StoreCore
from infinistore.disk_settings import DESCRIPTORS_OF_A_DISK
from infinistore.errors import OutOfMemory
from infinistore.server.environment import Environment
from infinistore.server.listeners import ServerAddresses
from infinistore.server.movers.base import Mover
from infinistore.server.movers.composed import make_movers, make_movers_of_others
from infinistore.server.take_over.kept import Kept
from infinistore.server.take_over.memory import OneStore, PoolLost
from infinistore.server.take_over.taking import Taking
from infinistore.tenant_limits import TenantLimits

if TYPE_CHECKING:
    from infinistore.server.disk import DiskService, ServerDisks
    from infinistore.server.tenancy import Tenancy


Background: TypeAlias = Callable[[], Awaitable[None]]


async def open_stores(
    config: ServerConfig,
    policy: Policy,
    addresses: ServerAddresses,
    environment: Environment,
    resources: ExitStack,
    *,
    pool: Pool,
    taking: Taking | Kept | None,
    parts: int = 1,
    reserve_descriptors: Callable[[int], None],
) -> "tuple[StoreCore, Sequence[Mover], ServerDisks | None, Sequence[Background], Tenancy | None]":
    """Make the store, its movers and its disks, what runs beside it, and its tenants.

    `resources` closes them. Without tenants, the store is in `pool`. The blocks come
    from the server that is being replaced, if there is one. The server can be one of
    `parts` shards. `reserve_descriptors` sets so many aside.

    Raises:
        ConfigError: the configuration, or the tenants file, cannot be used.
        OutOfMemory: the machine has no memory for the pool.
        PoolLost: the blocks of the earlier server cannot be used, and it has ended.
    """
    with _lost_without_memory(taking):
        if isinstance(policy, TenantPolicy):
            tenancy, kept = await _open_tenancy(
                config, policy, addresses, environment, resources, parts=parts, taking=taking
            )
            from infinistore.server.take_over.memory import HandedGroups  # late: most servers have no tenants

            tenancy.handed = HandedGroups(tenancy, kept, partial(_journal_of, config))
            background = [] if taking is None else await taking.take(tenancy.handed, resources)
            disks = None
            if config.disks:
                from infinistore.server.tenant_disks import open_tenant_disks  # late: it needs numpy

                limits = [one.divided(parts) for one in policy.tenants.limits]
                disks = await open_tenant_disks(
                    config, limits, tenancy, environment, resources, reserve_descriptors=reserve_descriptors
                )
            return tenancy.whole, tenancy.movers, disks, background, tenancy
        await _fill_pool(config, pool, environment, taking)
        core = make_core(config, pool, environment)
        movers = await environment.run_in_thread(_make_movers, config, core, addresses, environment, resources)
        background = [] if taking is None else await taking.take(OneStore(core), resources)
        reserve_descriptors(len(config.disks) * DESCRIPTORS_OF_A_DISK)
        return core, movers, await open_disks(config, core, environment, resources), background, None


@contextmanager
def _lost_without_memory(taking: Taking | Kept | None) -> Iterator[None]:
    """Where the machine has no memory beside what an ended server has left, raise
    `PoolLost`: without that, there may be enough.
    """
    try:
        yield
    except OutOfMemory as error:
        if taking is None or taking.serves:
            raise
        raise PoolLost(str(error)) from None


async def open_disks(
    config: ServerConfig, core: StoreCore, environment: Environment, resources: ExitStack
) -> "DiskService | None":
    """Open the disks that the configuration names; `resources` closes them.

    Raises:
        ConfigError: a disk cannot be used. Nothing on it was changed.
    """
    if not config.disks:
        return None
    from infinistore.server.disk import JOBS_END_S, DiskService

    disks = await environment.run_in_thread(environment.open_disks, config.disks, environment.random)
    resources.callback(disks.runner.close, timeout_s=JOBS_END_S)
    return DiskService(disks, core, config, clock=environment.clock, random=environment.random)


def make_core(config: ServerConfig, pool: Pool, environment: Environment) -> StoreCore:
    """Make the store of a server."""
    journal = _make_journal(config) if config.disks else None
    clock, random, buggify = environment.clock, environment.random, environment.buggify
    return StoreCore(pool, clock=clock, limits=_core_limits(config), random=random, journal=journal, buggify=buggify)


def _core_limits(config: ServerConfig) -> CoreLimits:
    return CoreLimits(
        max_key_bytes=config.max_key_bytes,
        max_value_bytes=config.max_value_bytes,
        max_batch_keys=config.max_batch_keys,
        max_protected_ratio=config.max_protected_ratio,
    )


def _make_movers(
    config: ServerConfig, core: StoreCore, addresses: ServerAddresses, environment: Environment, resources: ExitStack
) -> list[Mover]:
    others = make_movers_of_others(environment.installed_transports(), config, core, resources)
    own = make_movers(
        config,
        core,
        environment,
        resources,
        pool_bytes=config.max_pool_bytes or config.prealloc_bytes,
        writable=config.shm_writes != "off",
        tables=addresses.unix_socket is not None and environment.tables_are_safe(),
    )
    return [*others, *own]


async def _fill_pool(config: ServerConfig, pool: Pool, environment: Environment, taking: Taking | Kept | None) -> None:
    make = partial(make_arena, config, environment)
    if taking is None:
        pool.add_arena(await environment.run_in_thread(make, 0, config.prealloc_bytes))
    else:
        await taking.add_arenas(pool, make, environment.run_in_thread, size_bytes=config.prealloc_bytes)


async def _open_tenancy(
    config: ServerConfig,
    policy: TenantPolicy,
    addresses: ServerAddresses,
    environment: Environment,
    resources: ExitStack,
    *,
    parts: int,
    taking: Taking | Kept | None,
) -> "tuple[Tenancy, list[str]]":
    from infinistore.server.tenancy import open_groups  # late: most servers have no tenants

    return await open_groups(
        config,
        policy.tenants,
        _core_limits(config),
        environment,
        resources,
        make_arena=partial(make_arena, config, environment),
        tables=addresses.unix_socket is not None and environment.tables_are_safe(),
        parts=parts,
        taking=taking,
    )


def _journal_of(config: ServerConfig, limits: TenantLimits) -> Journal | None:
    """Return the journal of a tenant; None if it has no disks."""
    return _make_journal(config) if config.disks and limits.disk_max_bytes is not None else None


def _make_journal(config: ServerConfig) -> Journal:
    return Journal(reads=config.disk_admission == "second-use")


def make_arena(config: ServerConfig, environment: Environment, index: int, length: int) -> Arena:
    """Make an arena as the configuration says. Blocking."""
    return environment.create_arena(
        index,
        length,
        huge_pages=config.huge_pages,
        prefault_threads=os.cpu_count() or 1,
        numa_node=config.numa_node,
    )
