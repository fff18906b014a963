"""Makes the pools of a server with tenants, one for each trust group."""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from infinistore.access.tenants import Tenants as NamedTenants
from infinistore.allocators import create_allocator
from infinistore.config import ServerConfig
from infinistore.core.arena import Arena
from infinistore.core.limits import CoreLimits
from infinistore.core.pool import Pool
from infinistore.core.tenants import Tenants
from infinistore.errors import ConfigError
from infinistore.server.environment import Environment
from infinistore.server.movers.composed import make_group_movers
from infinistore.server.pools.planning import check_settings, group_sizes, is_for_one
from infinistore.server.pools.tenancy import Group, Tenancy
from infinistore.server.take_over.memory import Adopting

__all__ = ["open_groups"]

_log = logging.getLogger("infinistore.server")


async def open_groups(
    config: ServerConfig,
    named: NamedTenants,
    limits: CoreLimits,
    environment: Environment,
    resources: ExitStack,
    *,
    make_arena: Callable[[int, int], Arena],
    tables: bool,
    parts: int = 1,
    taking: Adopting | None = None,
) -> tuple[Tenancy, list[str]]:
    """Make the groups of a server, which can be one of `parts` shards; `resources`
    closes them. Return also the names of those that go on with memory of the earlier
    server.

    `tables` says whether clients that map a pool may read known blocks without asking.

    Raises:
        ConfigError: the tenants file and the configuration do not fit.
        OutOfMemory: the machine has no memory for the pools.
    """
    check_settings(config)
    groups: dict[str, Group] = {}
    kept: list[str] = []
    earlier = {} if taking is None else {group.name: group for group in taking.groups}
    for name, size_bytes in group_sizes(config, named, parts).items():
        members = [one.divided(parts) for one in named.limits if one.group == name]
        pool = Pool(create_allocator(config.allocator, config.minimal_allocate_bytes))
        resources.callback(pool.close)
        mapped = name in named.groups
        for_one = is_for_one(config, named, name)
        writable = mapped and (config.shm_writes == "on" or for_one)
        writers: Sequence[str] = ()
        if taking is not None and name in earlier:
            before = earlier[name]
            why = before.why_not(
                [one.tenant for one in members], mapped=mapped, writable=config.shm_writes == "on"
            ) or await taking.add_group(pool, make_arena, environment.run_in_thread, name, size_bytes)
            if why:
                taking.leave(name)
                _log.warning("the cache of a group starts empty", extra={"group": name, "reason": why})
            else:
                kept.append(name)
                writers = before.writers or ()
        if not pool.arenas:
            pool.add_arena(await environment.run_in_thread(make_arena, 0, size_bytes))
        tenants = Tenants(
            pool, clock=environment.clock, limits=limits, random=environment.random, buggify=environment.buggify
        )
        try:
            tenants.apply(members)
        except ConfigError as error:
            raise ConfigError(f"{config.tenants}: group {name!r}: {error}") from None
        make = partial(
            make_group_movers, config, environment, resources, tenants=tenants, mapped=mapped, writable=writable,
            tables=tables and mapped,
        )  # fmt: skip
        movers = await environment.run_in_thread(make)
        for_one = for_one or (bool(writers) and not writable)
        groups[name] = Group(tenants, movers, for_one, mapped, writable, writers)
    if taking is not None:
        for name in earlier.keys() - groups.keys():
            taking.leave(name)
    return Tenancy(groups, clock=environment.clock, parts=parts), kept
