"""Servers with tenants: their limits, what they may do, and tables that change.

Each client is of one tenant, and comes with one of its tokens. While clients work, the
table is replaced as by a reload: tokens are revoked and come back, roles are taken away
and given, limits change. In the end, the first table is in force again.

`TenantsWatch` looks at every eviction for a put: who is at or below what is reserved
for it loses nothing to others.
"""

import math
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeAlias

import attrs
import trio

from infinistore.access.identity import ALL_ROLES, Role
from infinistore.access.policy import TenantPolicy
from infinistore.access.tenants import Tenant, digest_of, make_token
from infinistore.access.tenants import Tenants as Table
from infinistore.config import ServerConfig
from infinistore.core.limits import CoreLimits
from infinistore.core.sharing import Sharer
from infinistore.core.tenants import Tenants, TenantStore
from infinistore.server import Server
from infinistore.server.environment import Environment
from infinistore.server.security import TenantsReload
from infinistore.server.tenancy import Tenancy, TrustGroup, open_groups
from infinistore.tenant_limits import DEFAULT_GROUP, TenantLimits
from tests.simulation.history import History, Life, TableInForce
from tests.simulation.world import World

__all__ = ["SimulatedTenants", "TenantSettings"]

_GROUP = "apart"
_LEAST_BYTES = 16 * 1024
Servers: TypeAlias = Sequence[Callable[[], Server | None]]
"""What returns the server that runs now on each node."""


@attrs.frozen
class TenantSettings:
    """How many tenants there are, and how often their table changes."""

    tenants: int = 0
    events: int = 0
    most_pause_s: float = 1.0
    """How long one table is in force at most."""
    groups: int = 1
    """How many trust groups they are in: 1 or 2."""
    has_rates: bool = True
    """Whether some have to wait when they ask for much. In a cluster, a node that has
    somebody wait longer than a lookup may take is a lost one to him."""

    @classmethod
    def choose(cls, chance: random.Random) -> "TenantSettings":
        """Choose settings of one run."""
        return cls(
            tenants=chance.choice([2, 2, 3]),
            events=chance.choice([0, 3, 10]),
            most_pause_s=chance.choice([0.2, 1.0, 5.0]),
            groups=chance.choice([1, 1, 2]),
        )


class SimulatedTenants:
    """The tenants of one server, or of the nodes of a cluster, in all of their lives.
    All nodes have the same table, but for the moments in which it is replaced.
    """

    def __init__(self, world: World, settings: TenantSettings, pool_bytes: int, history: History) -> None:
        self.settings = settings
        self.names = [f"tenant-{number + 1}" for number in range(settings.tenants)]
        self._world = world
        self._history = history
        self._random = world.generator("tenants")
        self._tokens = {name: [make_token(name, self._random.randbytes) for _ in range(2)] for name in self.names}
        self._group_bytes = {DEFAULT_GROUP: pool_bytes}
        if settings.groups > 1:
            self._group_bytes = {DEFAULT_GROUP: pool_bytes // 2, _GROUP: pool_bytes // 2}
        self._first = self._table(self._limits(), {})
        self.table = self._first
        """What the file says now."""
        self._tenancies: dict[str, Tenancy] = {}
        self._turn = trio.Lock()
        self._is_over = False
        history.tables.append(TableInForce(-math.inf, -math.inf, self.table))

    def token(self, client: str, number: int) -> str:
        """Return the token of a client."""
        name = self.names[number % len(self.names)]
        token = self._tokens[name][number // len(self.names) % 2]
        self._history.tenant_of[client] = name, digest_of(token)
        return token

    # Tables

    def _limits(self) -> dict[str, TenantLimits]:
        """Choose what each tenant may take. Something is left for who has nothing
        reserved.
        """
        chance, limits = self._random, {}
        for number, name in enumerate(self.names):
            group = DEFAULT_GROUP if number % self.settings.groups == 0 else _GROUP
            group_bytes = self._group_bytes[group]
            reserved_bytes = int(group_bytes * chance.choice([0, 0.1, 0.25]))
            max_bytes = chance.choice(
                [None, None, max(_LEAST_BYTES, reserved_bytes), max(_LEAST_BYTES, group_bytes // 2)]
            )
            limits[name] = TenantLimits(
                name,
                group,
                reserved_bytes=reserved_bytes,
                max_bytes=max_bytes,
                max_keys=chance.choice([None, None, 1, 3]),
                weight=chance.choice([1, 1, 5]),
                requests_per_s=chance.choice([None, None, None, 200.0]),
                bytes_per_s=chance.choice([None, None, None, 200_000.0]),
            )
            if not self.settings.has_rates:
                limits[name] = attrs.evolve(limits[name], requests_per_s=None, bytes_per_s=None)
        return limits

    def _table(self, limits: dict[str, TenantLimits], without: dict[str, Any]) -> Table:
        """Return a table with these limits; `without` says whose token is revoked, or
        which role a tenant has not.
        """
        tenants = {}
        for name in self.names:
            digests = tuple(digest_of(one) for one in self._tokens[name])
            roles = ALL_ROLES
            lost = without.get(name)
            if isinstance(lost, Role):
                roles -= {lost}
            elif lost is not None:
                digests = tuple(one for number, one in enumerate(digests) if number != lost)
            tenants[name] = Tenant(limits[name], digests, roles)
        groups = {name: size for name, size in self._group_bytes.items() if name != DEFAULT_GROUP}
        return Table(tenants, groups)

    async def change(self, servers: Servers, run_in_thread: Callable[..., Awaitable[Any]]) -> None:
        """Replace the table of these servers again and again."""
        for _ in range(self.settings.events):
            await trio.sleep(self.settings.most_pause_s * self._random.random())
            without = {
                name: self._random.choice([0, 1, Role.WRITE, Role.READ, Role.ADMIN])
                for name in self.names
                if self._random.random() < 0.4
            }
            limits = self._limits() if self._random.random() < 0.5 else {one.tenant: one for one in self.table.limits}
            async with self._turn:
                if self._is_over:
                    return
                await self._replace(self._table(limits, without), servers, run_in_thread)

    async def restore(self, servers: Servers, run_in_thread: Callable[..., Awaitable[Any]]) -> None:
        """Let the first table be in force again."""
        self._is_over = True
        async with self._turn:
            await self._replace(self._first, servers, run_in_thread)

    async def _replace(self, table: Table, servers: Servers, run_in_thread: Callable[..., Awaitable[Any]]) -> None:
        self._world.fault("TENANTS_CHANGED", "tenants")
        self.table = table
        in_force = TableInForce(self._world.clock.now, math.inf, table)
        self._history.tables.append(in_force)
        for find in servers:  # one after the other: some have it, and others not yet
            server = find()
            if server is None or not isinstance(server.policy, TenantPolicy):
                continue  # it has this table when it starts

            def load(_: ServerConfig) -> Table:
                return table

            reload = TenantsReload(ServerConfig(), server.policy, server, load=load, run_in_thread=run_in_thread)
            problem = await reload.reload_and_log()
            if problem:
                self._world.violation(f"a table of tenants was refused: {problem}")
        in_force.since_s = self._world.clock.now

    # Servers

    async def open(
        self,
        node: str,
        config: ServerConfig,
        limits: CoreLimits,
        environment: Environment,
        resources: ExitStack,
    ) -> tuple[TenantPolicy, Tenancy]:
        """Make what a server that starts has of them."""
        policy = TenantPolicy(self.table)
        tenancy = await open_groups(
            config, self.table, limits, environment, resources, make_arena=environment.create_arena, tables=False
        )
        self._tenancies[node] = tenancy
        for group in tenancy.groups().values():
            TenantsWatch(self._world, group.tenants)
        return policy, tenancy

    async def catch_up(self, server: Server) -> None:
        """Let a server that is about to serve have the table that came meanwhile."""
        assert isinstance(server.policy, TenantPolicy)
        if server.policy.tenants is not self.table:
            await server.apply_limits(self.table.limits)
            server.policy.replace(self.table)

    def stores(self, node: str) -> Iterator[tuple[str, Tenants, TenantStore]]:
        """Return the store of each tenant that has used it on a node, with those it
        shares its pool with.
        """
        for group in self._groups_of(node):
            for name, store in group.tenants.used_stores().items():
                yield name, group.tenants, store

    def _groups_of(self, node: str) -> list[TrustGroup]:
        return [*self._tenancies[node].groups().values()] if node in self._tenancies else []

    def expire_holds(self, node: str) -> None:
        """End the holds whose time is over."""
        for _, _, store in self.stores(node):
            store.expire_holds()

    def note_losses(self, node: str, life: Life) -> None:
        """Note which tenants have lost blocks to eviction."""
        life.evicted_of = {name for name, _, store in self.stores(node) if any(store.space.evicted.values())}
        for group in self._groups_of(node):  # of stores that are no more
            past = group.tenants.past.items()
            life.evicted_of |= {name for name, figures in past if any(attrs.astuple(figures.evicted))}

    def check_rest(self, node: str, when: str) -> None:
        """Check that each tenant has on a node what its blocks take, no more than it
        may, and nothing that is leased or reserved.
        """
        # What a tenant has too much is taken when it puts something: in a cluster,
        # perhaps nothing comes to this node after its limits were lowered.
        may_have_more = len(self._tenancies) > 1 and self.settings.events > 0
        pools: dict[Tenants, int] = {}
        for name, tenants, store in self.stores(node):
            found = store.statistics()
            pools[tenants] = pools.get(tenants, 0) + found.used_bytes
            footprints = sum(store.pool.footprint(length) for _, length in store.sample(1 << 20))
            if found.used_bytes - found.reserved_bytes != footprints:
                self._world.violation(f"{when}, {name} has {found.used_bytes} bytes for blocks of {footprints} bytes")
            if found.pinned_bytes != found.protected_bytes or found.reserved_bytes:
                self._world.violation(
                    f"{when}, {name} has pinned {found.pinned_bytes} and {found.reserved_bytes} bytes"
                )
            limits = store.tenant_limits
            if may_have_more:
                continue
            if found.used_bytes > (limits.max_bytes or math.inf) or found.keys > (limits.max_keys or math.inf):
                self._world.violation(f"{when}, {name} has {found.keys} keys and {found.used_bytes} bytes: {limits}")
        for tenants, used_bytes in pools.items():
            if tenants.pool.used_bytes != used_bytes:
                self._world.violation(
                    f"{when}, {tenants.pool.used_bytes} bytes are used, and tenants have {used_bytes}"
                )


class TenantsWatch:
    """Looks at the evictions of one pool."""

    def __init__(self, world: World, tenants: Tenants) -> None:
        self._world = world
        self._tenants = tenants
        for name in ("make_space", "make_larger_pieces", "evict"):
            setattr(tenants.sharing, name, partial(self._watched, getattr(tenants.sharing, name)))

    def _watched(self, evict: Callable[..., Any], *args: Any, **options: Any) -> Any:
        asking: Sharer | None = args[0] if args and not isinstance(args[0], float) else None
        before = self._figures()
        try:
            return evict(*args, **options)
        finally:
            for name, (store, used_bytes, evicted) in before.items():
                lost, kept_bytes = sum(store.space.evicted.values()) - evicted, store.tenant_limits.reserved_bytes
                if lost and store.space is not asking and used_bytes <= kept_bytes:
                    self._world.violation(
                        f"{name} had {used_bytes} of {kept_bytes} bytes that are reserved for it, and lost {lost}"
                        " blocks to others"
                    )

    def _figures(self) -> dict[str, tuple[TenantStore, int, int]]:
        return {
            name: (store, store.space.taken_bytes, sum(store.space.evicted.values()))
            for name, store in self._tenants.used_stores().items()
        }
