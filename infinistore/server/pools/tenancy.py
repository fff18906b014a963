"""Which pool and which store a connection uses: those of its tenant, found once, when
the connection has proven whose it is.

A trust group has a pool of its own, made when the server starts. So the kernel itself
keeps clients of one group from the memory of another: they are different files.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import attrs
import trio

from infinistore.access.identity import Identity, Proof
from infinistore.core.store import StoreCore
from infinistore.core.tenants import Tenants
from infinistore.protocol.messages import Tree
from infinistore.server.budgets import Departures, Rates
from infinistore.server.movers.base import Mover
from infinistore.server.pools.planning import OnlyTenants, by_group
from infinistore.server.pools.whole_store import WholeStore
from infinistore.server.session.session import ServerContext
from infinistore.server.take_over.memory import Whole
from infinistore.statistics import DiskTierStatistics, StoreStatistics
from infinistore.tenant_limits import TenantLimits, TenantStatistics

if TYPE_CHECKING:
    from infinistore.server.disk import DiskService

__all__ = ["Group", "HasDisks", "Tenancy"]

_SLICE_KEYS = 4096
_SLICE_TENANTS = 16


class HasDisks(Protocol):
    """The disks of tenants."""

    on_end: Callable[[], object]
    """Called when nothing uses the store of a tenant any more that has gone."""

    def service(self, tenant: str) -> "DiskService | None":
        """Return the disks of a tenant; None if it has none."""

    async def open_for(self, limits: Iterable[TenantLimits]) -> None:
        """Open the disks of those tenants that this server has not had yet.

        Raises:
            ConfigError: a disk cannot be used.
        """

    def keep(self, limits: Iterable[TenantLimits]) -> None:
        """End the disks of all but these tenants, and remove their blocks."""


@attrs.frozen
class Group:
    """A trust group: its tenants, which share a pool, and the movers of that pool."""

    tenants: Tenants
    movers: Sequence[Mover]
    for_one: bool = False
    """Whether clients may have mapped the pool to write because it had one tenant when
    the server started, and so may have no other."""
    mapped: bool = False
    """Whether its clients may map the pool."""
    writable: bool = False
    """Whether those who map it may write to it."""
    writers: Sequence[str] = ()
    """Whose clients may have mapped it to write before this server had it."""


class Tenancy:
    """The groups of a server, by name. `whole` is all of them as one store.

    A server can be one of `parts` shards: each tenant has that part of its limits here.
    """

    handed: Whole
    """All of them, as one process hands them to another. Whoever makes this sets it."""

    def __init__(
        self, groups: Mapping[str, Group], *, clock: Callable[[], float] = trio.current_time, parts: int = 1
    ) -> None:
        self._groups = dict(groups)
        self._parts = parts
        self.whole: StoreCore = WholeStore([group.tenants for group in groups.values()], clock=clock)
        self.figures: Callable[[str, StoreCore, bool, DiskTierStatistics | None], Awaitable[Tree]] | None = None
        """Returns what a tenant is told of itself and its store, without or with
        details, and of its disks."""
        self.disks: HasDisks | None = None
        """The disks of tenants, if the server has disks."""
        self._contexts: dict[str, ServerContext] = {}
        self._rates: dict[str, Rates] = {}
        self._only = OnlyTenants({name: group.writers for name, group in self._groups.items() if group.for_one})
        self._only.note({name: [group.tenants.limits(one) for one in group.tenants] for name, group in groups.items()})
        self._departures = Departures()
        self._left = trio.Event()

    def __len__(self) -> int:
        """Return the number of tenants."""
        return sum(len(group.tenants) for group in self._groups.values())

    async def statistics(self, connections: Counter[str], refused: Counter[str]) -> list[TenantStatistics]:
        """Return the figures of each tenant. `connections` are those that are open, and
        `refused` counts refused connections and requests. Other tasks run meanwhile."""
        found: list[TenantStatistics] = []
        for group in list(self._groups.values()):
            stores = group.tenants.used_stores()
            for name in group.tenants:
                if len(found) % _SLICE_TENANTS == 0:
                    await trio.lowlevel.checkpoint()
                if name not in group.tenants:  # removed meanwhile
                    continue
                rates, store = self._rates.get(name), stores.get(name)
                if store is not None:
                    store.catch_up()
                found.append(
                    _figures(
                        group.tenants.limits(name),
                        group.tenants.past.get(name) if store is None else store.statistics(),
                        connections=connections[name],
                        refused=refused[name],
                        pauses=0 if rates is None else rates.pauses,
                    )
                )
        return found

    @property
    def movers(self) -> Sequence[Mover]:
        """The movers of a group. Those of all groups are alike."""
        return next(iter(self._groups.values())).movers

    def context(self, shared: ServerContext, identity: Identity) -> ServerContext:
        """Return what the sessions of a tenant share; `shared` is what all sessions
        do."""
        if identity.proof is Proof.SUCCESSOR:
            return shared
        limits = identity.limits.divided(self._parts)
        found = self._contexts.get(limits.tenant)
        if found is None:
            group = self._groups[limits.group]
            store, figures = group.tenants.store(limits.tenant), self.figures
            assert figures is not None

            disk = None if self.disks is None else self.disks.service(limits.tenant)

            async def statistics(with_details: bool) -> Tree:
                return await figures(limits.tenant, store, with_details, None if disk is None else disk.statistics())

            rates = self._rates.setdefault(limits.tenant, Rates(limits, self._departures))
            found = attrs.evolve(
                shared,
                core=store,
                movers=group.movers,
                statistics=statistics,
                disk=disk,
                rates=rates,
            )
            self._contexts[limits.tenant] = found
        return found

    async def apply(self, limits: Iterable[TenantLimits]) -> None:
        """Have these tenants from now on.

        Raises:
            ConfigError: these cannot be. Nothing has changed.
        """
        mine = [one.divided(self._parts) for one in limits]
        wanted = by_group(mine, self._groups)
        self._only.check(wanted)
        for name, group in self._groups.items():
            group.tenants.check(wanted[name])
        if self.disks is not None:
            await self.disks.open_for(mine)
        for name, group in self._groups.items():
            group.tenants.apply(wanted[name])
        self._only.note(wanted)
        now = {one.tenant: one for some in wanted.values() for one in some}
        for tenant, context in list(self._contexts.items()):
            if tenant not in now or context.movers is not self._groups[now[tenant].group].movers:
                del self._contexts[tenant]
        for tenant, rates in list(self._rates.items()):
            if tenant in now:
                rates.set_limits(now[tenant])
            else:
                del self._rates[tenant]
        if self.disks is not None:
            self.disks.keep(mine)
        self._left.set()

    def have(self, disks: HasDisks) -> None:
        """Use these disks, from before anybody is served."""
        self.disks = disks
        disks.on_end = self.look_who_left

    def look_who_left(self) -> None:
        """Hear that somebody uses less of what a tenant has."""
        self._left.set()

    def writers(self, group: str) -> list[str] | None:
        """Return the tenants whose clients may have mapped the pool of a group to
        write; None: anybody."""
        found = self._groups[group]
        return self._only.tenants(group) if found.for_one else None if found.writable else []

    def left(self, identity: Identity) -> None:
        """Hear that a session of a tenant is over. It may have been the last: then an
        empty store goes, and so do the blocks of a tenant that was removed."""
        if identity.tenant not in self._contexts:
            self._left.set()
        elif self._groups[identity.limits.group].tenants.rest(identity.tenant):
            del self._contexts[identity.tenant]
            if self._rates[identity.tenant].idle:
                del self._rates[identity.tenant]

    async def run(self) -> None:
        """Remove the blocks of tenants that have left, and hear of clients that leave,
        until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._departures.run)
            nursery.start_soon(self._remove_those_that_left)

    async def _remove_those_that_left(self) -> None:
        while True:
            await self._left.wait()
            self._left = trio.Event()
            for group in self._groups.values():
                while group.tenants.remove_left(_SLICE_KEYS):
                    await trio.lowlevel.checkpoint()

    def groups(self) -> dict[str, Group]:
        """Return the groups, by name."""
        return dict(self._groups)


def _figures(
    limits: TenantLimits, told: StoreStatistics | None, *, connections: int, refused: int, pauses: int
) -> TenantStatistics:
    """Return the figures of a tenant; `told` is None if it has used no store."""
    return TenantStatistics(
        tenant=limits.tenant,
        group=limits.group,
        connections=connections,
        keys=0 if told is None else told.keys,
        used_bytes=0 if told is None else told.used_bytes,
        pinned_bytes=0 if told is None else told.pinned_bytes + told.reserved_bytes,
        reserved_bytes=limits.reserved_bytes,
        max_bytes=limits.max_bytes,
        hits=0 if told is None else told.hits,
        misses=0 if told is None else told.misses,
        evicted=0 if told is None else sum(attrs.astuple(told.evicted)),
        refused=refused,
        pauses=pauses,
    )
