"""The pools of a server with tenants: one for each trust group, planned and made when
the server starts; and which pool and store a connection uses: those of its tenant,
found once, when the connection has proven whose it is.

So the kernel itself keeps clients of one group from the memory of another: they are
different files. Memory that clients of one group may have mapped never becomes another
group's. `WholeStore` is all tenants as one store, for the operator.
"""

import logging
import mmap
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain

import attrs
import trio

from infinistore.access.identity import Identity, Proof
from infinistore.access.tenants import Tenants as NamedTenants
from infinistore.allocators import create_allocator
from infinistore.config import SMALLEST_POOL_BYTES, ServerConfig
from infinistore.core import hand_over
from infinistore.core.arena import Arena
from infinistore.core.hand_over import Adopted
from infinistore.core.journal import Journal
from infinistore.core.limits import CoreLimits
from infinistore.core.pool import Pool
from infinistore.core.pool_state import GroupLayout, GroupStates, TenantState, encode_groups
from infinistore.core.removals import SLICE_KEYS
from infinistore.core.space import EvictionCause
from infinistore.core.store import StoreCore
from infinistore.core.tenants import Tenants, TenantStore, why_not_reserved
from infinistore.disk.tiers import Tiers
from infinistore.disk_settings import SMALLEST_DISK_BYTES
from infinistore.errors import ConfigError
from infinistore.eviction import eviction_class
from infinistore.host import free_huge_pages
from infinistore.protocol.messages import Tree
from infinistore.server.budgets import Departures, Rates
from infinistore.server.disk import ServerDisks, make_journal
from infinistore.server.environment import Environment
from infinistore.server.movers.base import Mover
from infinistore.server.movers.composed import make_movers
from infinistore.server.session.session import ServerContext
from infinistore.server.take_over.memory import Adopting, Ended, ServerMemory, StandIn, Taken, watched_of
from infinistore.sizes import in_units
from infinistore.statistics import DiskTierStatistics, StoreStatistics, TenantStatistics, merged
from infinistore.tenant_limits import DEFAULT_GROUP, TenantLimits, why_no_places

_log = logging.getLogger("infinistore.server")


def _check_settings(config: ServerConfig) -> None:
    """Raise ConfigError if the configuration has what does not work with tenants."""
    if config.auto_increase:
        raise ConfigError(
            "--tenants does not go together with --auto-increase: pools of groups have fixed sizes; leave out"
            " --auto-increase, or --tenants"
        )


def disk_parts(config: ServerConfig, size_bytes: int) -> list[int]:
    """Return what a tenant may take of each disk, of `size_bytes` on all."""
    total_bytes = sum(disk.size_bytes for disk in config.disks)
    return [size_bytes * disk.size_bytes // total_bytes for disk in config.disks]


def check_disks(config: ServerConfig, limits: Iterable[TenantLimits]) -> None:
    """Raise ConfigError if the disks have no room for what these tenants may have
    there, or one may have too little. Without disks, all have none."""
    wanted_bytes, total_bytes = 0, sum(disk.size_bytes for disk in config.disks)
    least_bytes = config.shards * SMALLEST_DISK_BYTES
    for one in limits if config.disks else ():
        if one.disk_max_bytes is not None:
            wanted_bytes += one.disk_max_bytes
            smallest_bytes = min(disk.size_bytes for disk in config.disks)
            if min(disk_parts(config, one.disk_max_bytes)) < least_bytes:
                enough_bytes = -(-least_bytes * total_bytes // smallest_bytes)
                raise ConfigError(
                    f"tenant {one.tenant!r} may have {in_units(one.disk_max_bytes)} on disk, which is divided among all"
                    f" disks and shards; give it a disk_max_bytes of {in_units(enough_bytes)} or more, or none"
                )
    if wanted_bytes > total_bytes:
        raise ConfigError(
            f"tenants may have {in_units(wanted_bytes)} on disk together, and the disks have {in_units(total_bytes)};"
            " lower disk_max_bytes, or give larger disks"
        )


def _group_sizes(config: ServerConfig, tenants: NamedTenants, parts: int = 1) -> dict[str, int]:
    """Return the bytes of each group's pool.

    Groups that the file gives a size have it. Tenants that name no group share the
    rest. In one of `parts` shards, each group has that part, in whole pages.

    Raises:
        ConfigError: the sizes are more than the pool, or a group has none.
    """
    page_bytes = 1 if parts == 1 else free_huge_pages()[1] if config.huge_pages else mmap.PAGESIZE
    sizes = {name: size // parts // page_bytes * page_bytes or size // parts for name, size in tenants.groups.items()}
    rest_bytes = config.prealloc_bytes - sum(sizes.values())
    if rest_bytes < 0:
        raise ConfigError(
            f"the groups of {config.tenants} have {in_units(sum(sizes.values()))} together, and --prealloc-size is"
            f" {in_units(config.prealloc_bytes)}; make groups smaller, or the pool larger"
        )
    if DEFAULT_GROUP not in sizes and (not sizes or any(one.group == DEFAULT_GROUP for one in tenants.limits)):
        if not rest_bytes:
            raise ConfigError(
                f"the groups of {config.tenants} take all of --prealloc-size, and some tenants are in no group; make"
                " groups smaller, or the pool larger, or put each tenant into a group"
            )
        sizes[DEFAULT_GROUP] = rest_bytes
    _by_group(tenants.limits, sizes)
    return sizes


def _by_group(limits: Iterable[TenantLimits], groups: Iterable[str]) -> dict[str, list[TenantLimits]]:
    """Return the limits of the tenants of each group.

    Raises:
        ConfigError: a tenant is in another group.
    """
    found: dict[str, list[TenantLimits]] = {name: [] for name in groups}
    for one in limits:
        if one.group not in found:
            raise ConfigError(
                f"tenant {one.tenant!r} is in group {one.group!r}, which has no pool; name the group under groups: in"
                " the tenants file, and restart the server, because pools are made when it starts"
            )
        found[one.group].append(one)
    return found


def _is_for_one(config: ServerConfig, tenants: NamedTenants, group: str) -> bool:
    """Whether a group has one tenant now, and its pool is writable for that one."""
    members = sum(one.group == group for one in tenants.limits)
    return group in tenants.groups and config.shm_writes == "auto" and members <= 1


class OnlyTenants:
    """Who the groups for one are for. Processes of a tenant that was removed keep what
    they have mapped, so nobody comes after it."""

    def __init__(self, groups: Mapping[str, Iterable[str]]) -> None:
        self._tenants = {name: set(tenants) for name, tenants in groups.items()}

    def tenants(self, group: str) -> list[str]:
        """Return who has been in a group for one."""
        return sorted(self._tenants[group])

    def check(self, wanted: Mapping[str, Iterable[TenantLimits]]) -> None:
        """Raise ConfigError if a group for one would have another tenant."""
        for name, tenants in self._tenants.items():
            if len(tenants | {one.tenant for one in wanted[name]}) > 1:
                raise ConfigError(
                    f"group {name!r} had one tenant when the server started, whose clients may write to its memory; "
                    "restart the server for another tenant there, or put it into a group of its own"
                )

    def note(self, wanted: Mapping[str, Iterable[TenantLimits]]) -> None:
        """Note who has been in them."""
        for name, tenants in self._tenants.items():
            tenants |= {one.tenant for one in wanted[name]}


class PlannedGroups:
    """The groups of a server with shards, as the supervisor sees them, which has no
    pool: what no shard would take is refused once, in the sizes of the whole server.
    """

    sessions = ()
    """It has none."""

    def __init__(self, config: ServerConfig, tenants: NamedTenants) -> None:
        """Raises ConfigError if the tenants file and the configuration do not fit."""
        _check_settings(config)
        self._config = config
        self._sizes = _group_sizes(config, tenants)
        least_bytes = config.shards * max(SMALLEST_POOL_BYTES, config.minimal_allocate_bytes)
        for name, size_bytes in self._sizes.items():
            if size_bytes < least_bytes:
                raise ConfigError(
                    f"{config.tenants}: group {name!r} has {in_units(size_bytes)} for {config.shards} shards; give it"
                    f" {in_units(least_bytes)} or more, or start fewer shards"
                )
        self._only = OnlyTenants({name: () for name in self._sizes if _is_for_one(config, tenants, name)})
        self._apply(tenants.limits)

    async def apply_limits(self, limits: list[TenantLimits]) -> None:
        """Have these tenants from now on.

        Raises:
            ConfigError: these cannot be. Nothing has changed.
        """
        self._apply(limits)

    def _apply(self, limits: list[TenantLimits]) -> None:
        if problem := why_no_places(len(limits), self._config.max_connections):
            raise ConfigError(problem)
        check_disks(self._config, limits)
        wanted = _by_group(limits, self._sizes)
        self._only.check(wanted)
        for name, members in wanted.items():
            if problem := why_not_reserved(members, self._sizes[name]):
                raise ConfigError(f"group {name!r}: {problem}")
        self._only.note(wanted)


class WholeStore(StoreCore):
    """The stores of all tenants, without keys of its own. It is not written to."""

    def __init__(self, groups: Sequence[Tenants], *, clock: Callable[[], float]) -> None:
        pools = [group.pool for group in groups]
        pool = pools[0] if len(pools) == 1 else Pool(pools[0].allocator)
        pool.capacity_bytes = sum(one.capacity_bytes for one in pools)
        super().__init__(pool, clock=clock)
        self._groups = groups
        self._pools = pools

    def _stores(self) -> list[TenantStore]:
        return list(chain.from_iterable(group.used_stores().values() for group in self._groups))

    def catch_up(self) -> None:
        """Take in what clients have written and pinned without a request."""
        for store in self._stores():
            store.catch_up()

    def statistics(self) -> StoreStatistics:
        """Return the sum of what all tenants have."""
        allocator = merged([pool.statistics() for pool in self._pools])
        past = chain.from_iterable(group.past.values() for group in self._groups)
        total = merged([*(store.statistics() for store in self._stores()), *past] or [super().statistics()])
        return attrs.evolve(
            total, capacity_bytes=allocator.capacity_bytes, used_bytes=allocator.used_bytes,
            arenas=allocator.arenas, allocator=allocator,
        )  # fmt: skip

    def purge(self, max_keys: int | None = None) -> int:
        """Remove keys of all tenants; return how many."""
        purged = 0
        for store in self._stores():
            purged += store.purge(None if max_keys is None else max_keys - purged)
            if max_keys is not None and purged >= max_keys:
                break
        return purged

    def purge_in_slices(self) -> Iterator[int]:
        """Remove all keys of all tenants, some at a time; yield how many."""
        for store in self._stores():
            yield from store.purge_in_slices()

    def evict(self, low: float, high: float, cause: EvictionCause = "manual", *, max_blocks: int | None = None) -> int:
        """Evict in each group down to `low` of its pool if more than `high` of it is
        used, from those who are most above what is reserved for them."""
        return sum(group.evict(low, high, cause, max_blocks=max_blocks) for group in self._groups)

    def __len__(self) -> int:
        """Return the number of keys of all tenants."""
        return sum(map(len, self._stores()))

    def sample(self, limit: int) -> list[tuple[str, int]]:
        """Return none: keys are their tenants' business."""
        return []


_SLICE_TENANTS = 16


@attrs.frozen
class TrustGroup:
    """A trust group: its tenants, which share a pool, and the movers of that pool."""

    tenants: Tenants
    movers: Sequence[Mover]
    for_one: bool = False
    """Whether clients may have mapped the pool to write, as that of one tenant."""
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

    handed: ServerMemory
    """All of them, as one process hands them to another."""

    def __init__(
        self, groups: Mapping[str, TrustGroup], *, clock: Callable[[], float] = trio.current_time, parts: int = 1
    ) -> None:
        self._groups = dict(groups)
        self._parts = parts
        self.whole: StoreCore = WholeStore([group.tenants for group in groups.values()], clock=clock)
        self.figures: Callable[[str, StoreCore, bool, DiskTierStatistics | None], Awaitable[Tree]] | None = None
        """Returns the statistics of a tenant: its store and its disks."""
        self.disks = ServerDisks(Tiers(self.whole))
        """The disks of tenants."""
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
        """Return what a tenant's sessions share, beside what all share."""
        if identity.proof is Proof.SUCCESSOR:
            return shared
        limits = identity.limits.divided(self._parts)
        found = self._contexts.get(limits.tenant)
        if found is None:
            group = self._groups[limits.group]
            store, figures = group.tenants.store(limits.tenant), self.figures
            assert figures is not None

            tiers = self.disks.tiers(limits.tenant, store)

            async def statistics(with_details: bool) -> Tree:
                return await figures(limits.tenant, store, with_details, tiers.statistics())

            rates = self._rates.setdefault(limits.tenant, Rates(limits, self._departures))
            found = attrs.evolve(
                shared,
                tiers=tiers,
                movers=group.movers,
                statistics=statistics,
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
        wanted = _by_group(mine, self._groups)
        self._only.check(wanted)
        for name, group in self._groups.items():
            group.tenants.check(wanted[name])
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
        self.disks.keep(mine)
        self._left.set()

    def have(self, disks: ServerDisks) -> None:
        """Use these disks, from before anybody is served."""
        self.disks = disks
        disks.on_end = self.look_who_left

    def look_who_left(self) -> None:
        """Hear that somebody uses less of what a tenant has."""
        self._left.set()

    def writers(self, group: str) -> list[str] | None:
        """Return who may have mapped a group's pool to write; None: anybody."""
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
        """Remove the blocks of tenants that have left, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._departures.run)
            nursery.start_soon(self._remove_those_that_left)

    async def _remove_those_that_left(self) -> None:
        while True:
            await self._left.wait()
            self._left = trio.Event()
            for group in self._groups.values():
                while group.tenants.remove_left(SLICE_KEYS):
                    await trio.lowlevel.checkpoint()

    def groups(self) -> dict[str, TrustGroup]:
        """Return the groups, by name."""
        return dict(self._groups)


class HandedGroups:
    """The groups of `tenancy`; those in `kept` have an earlier server's memory."""

    def __init__(self, tenancy: Tenancy, kept: Sequence[str], config: ServerConfig) -> None:
        self._tenancy = tenancy
        self._groups = tenancy.groups()
        self._kept = kept
        self._config = config
        self._to_verify: list[TenantStore] = []

    def __len__(self) -> int:
        return len(self._tenancy.whole)

    @property
    def arenas(self) -> Sequence[Arena]:
        """Those of one group after the other."""
        return [arena for group in self._groups.values() for arena in group.tenants.pool.arenas]

    def describe(self) -> list[bytes]:
        """What each group has, and who may have mapped it."""
        return encode_groups(GroupStates(self._layouts(), []))

    def export(self, instance: str, ended: Sequence[Ended]) -> tuple[list[Ended], list[bytes]]:
        """See `ServerMemory`."""
        left = {one.client: one for one in ended if one.client is not None}
        watched: list[Ended] = []
        tenants: list[TenantState] = []
        for name, group in self._groups.items():
            for tenant, store in group.tenants.all_stores().items():
                mine = [left.pop(client) for client in list(left) if client in store.clients]
                of_tenant, pins = watched_of(store, mine)
                watched += of_tenant
                tenants.append(TenantState(name, tenant, hand_over.export(store, instance, pins)))
        quiet = [one for one in ended if one.client is None or one.client in left]
        states = GroupStates(self._layouts(), tenants, len(quiet))
        return [*watched, *quiet], encode_groups(states)

    def adopt(self, state: GroupStates) -> Taken:
        """See `ServerMemory`."""
        adopted: dict[tuple[str, str], Adopted] = {}
        for name in self._kept:
            states = {one.tenant: one.state for one in state.tenants if one.group == name}
            found = self._groups[name].tenants.adopt(states, self._make_journal)
            adopted |= {(name, tenant): one for tenant, one in found.items()}
        streams: list[list[StandIn]] = []
        own: list[StandIn] = []
        for one in state.tenants:
            of_tenant = adopted.get((one.group, one.tenant))
            if of_tenant is None:  # nobody uses that memory here
                streams += [[] for _ in one.state.pins[:-1]]
                continue
            store = self._groups[one.group].tenants.all_stores()[one.tenant]
            self._to_verify.append(store)
            *clients, of_process = [
                StandIn(client, store, self._tenancy.look_who_left) for client in of_tenant.stand_ins
            ]
            streams += [[client] for client in clients]
            own.append(of_process)
        kept = sum(one.kept for one in adopted.values())
        stand_ins = [*streams, *([] for _ in range(state.quiet)), own]
        return Taken(kept, sum(len(one.state.keys) for one in state.tenants) - kept, stand_ins)

    def verify_some(self, most_bytes: int) -> bool:
        """See `ServerMemory`."""
        while self._to_verify:
            if hand_over.verify_some(self._to_verify[-1], most_bytes):
                return True
            self._to_verify.pop()
        return False

    @property
    def checksum_drops(self) -> int:
        """See `ServerMemory`."""
        return self._tenancy.whole.statistics().checksum_drops

    def _layouts(self) -> list[GroupLayout]:
        return [
            GroupLayout(
                name,
                [arena.length for arena in group.tenants.pool.arenas],
                group.mapped,
                self._tenancy.writers(name),
            )
            for name, group in self._groups.items()
        ]

    def _make_journal(self, limits: TenantLimits) -> Journal | None:
        """Return the journal of a tenant; None if it has no disks."""
        has_disks = self._config.disks and limits.disk_max_bytes is not None
        return make_journal(self._config) if has_disks else None


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
) -> Tenancy:
    """Make the groups of a server, which can be one of `parts` shards; `resources`
    closes them.

    `tables` says whether clients that map a pool may read known blocks without asking.

    Raises:
        ConfigError: the tenants file and the configuration do not fit.
        OutOfMemory: the machine has no memory for the pools.
    """
    _check_settings(config)
    groups: dict[str, TrustGroup] = {}
    kept: list[str] = []
    earlier = {} if taking is None else {group.name: group for group in taking.groups}
    for name, size_bytes in _group_sizes(config, named, parts).items():
        members = [one.divided(parts) for one in named.limits if one.group == name]
        pool = Pool(create_allocator(config.allocator, config.minimal_allocate_bytes))
        resources.callback(pool.close)
        mapped = name in named.groups
        for_one = _is_for_one(config, named, name)
        writable = mapped and (config.shm_writes == "on" or for_one)
        writers: Sequence[str] = ()
        if taking is not None and name in earlier:
            before = earlier[name]
            why = before.why_not([one.tenant for one in members], mapped=mapped, writable=config.shm_writes == "on")
            why = why or taking.why_not(before.arenas, size_bytes)
            if not why:
                try:
                    await taking.add_arenas(
                        pool, make_arena, environment.run_in_thread, size_bytes=size_bytes, group=name
                    )
                except ValueError as error:
                    why = str(error)
            if why:
                taking.leave(name)
                _log.warning("the cache of a group starts empty", extra={"group": name, "reason": why})
            else:
                kept.append(name)
                writers = before.writers or ()
        if not pool.arenas:
            pool.add_arena(await environment.run_in_thread(make_arena, 0, size_bytes))
        tenants = Tenants(
            pool,
            clock=environment.clock,
            limits=limits,
            random=environment.random,
            make_store=environment.make_tenant_store,
            eviction=eviction_class(config.eviction),
        )
        try:
            tenants.apply(members)
        except ConfigError as error:
            raise ConfigError(f"{config.tenants}: group {name!r}: {error}") from None
        make = partial(
            make_movers, config, tenants, environment, resources, pool_bytes=pool.capacity_bytes, mapped=mapped,
            writable=writable, tables=tables and mapped,
        )  # fmt: skip
        movers = await environment.run_in_thread(make)
        for_one = for_one or (bool(writers) and not writable)
        groups[name] = TrustGroup(tenants, movers, for_one, mapped, writable, writers)
    if taking is not None:
        for name in earlier.keys() - groups.keys():
            taking.leave(name)
    tenancy = Tenancy(groups, clock=environment.clock, parts=parts)
    tenancy.handed = HandedGroups(tenancy, kept, config)
    return tenancy
