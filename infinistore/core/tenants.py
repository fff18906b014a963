"""The tenants of one pool: a store for each, made when it is first used.

A `TenantStore` is a `StoreCore` of its own, in a pool that others use, too. Keys, pins,
holds and statistics are the tenant's. No call on it tells anything of another tenant,
and a key that another one has is missing here, in the same index. In addition to what
`StoreCore` promises, what the clients of a tenant have leased, reserved and held
together is within `max_pinned_ratio` of the tenant's room.

A tenant that nobody has used yet costs its limits and a place in a table. One whose
clients have left an empty store costs its figures, too (`rest`). Tenants come, change
and go while the others are served: `apply` takes all of them at once, or none.

Leaves to others: who is which tenant; that nobody uses the store of a tenant that has
gone (its sessions end); and to call `remove_left` until it is done, in steps.
"""

import random as random_module
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import attrs

from infinistore.core.clients import Client, Hazard
from infinistore.core.hand_over import Adopted, adopt_pinned, adopt_rest
from infinistore.core.index import Entry
from infinistore.core.journal import Journal
from infinistore.core.limits import CoreLimits, Watermarks
from infinistore.core.pool import Pool
from infinistore.core.pool_state import PoolState
from infinistore.core.sharing import Sharing, TenantPool, TenantSpace
from infinistore.core.space import EvictionCause
from infinistore.core.store import StoreCore
from infinistore.errors import ConfigError, LimitExceeded
from infinistore.eviction.base import Eviction, LeastRecentlyUsed
from infinistore.sizes import in_units
from infinistore.statistics import StoreStatistics
from infinistore.tenant_limits import TenantLimits


@attrs.frozen
class _Limits(CoreLimits):
    """The limits of a store, which ask the tenant, too."""

    check_pins: Callable[[int], object] = attrs.field(default=int, eq=False)

    def check_share(self, name: str, pinned_bytes: int, wanted_bytes: int, capacity_bytes: int) -> None:
        super().check_share(name, pinned_bytes, wanted_bytes, capacity_bytes)
        if wanted_bytes:
            self.check_pins(wanted_bytes)

    def check_held(self, held_bytes: int, more_bytes: int, capacity_bytes: int) -> None:
        super().check_held(held_bytes, more_bytes, capacity_bytes)
        self.check_pins(more_bytes)

    def check_protected(self, protected_bytes: int, more_bytes: int, capacity_bytes: int) -> None:
        super().check_protected(protected_bytes, more_bytes, capacity_bytes)
        self.check_pins(more_bytes)


class TenantStore(StoreCore):
    """The store of the tenant that `tenant_limits` names."""

    pool: TenantPool
    space: TenantSpace

    def __init__(
        self,
        sharing: Sharing,
        tenant_limits: TenantLimits,
        *,
        clock: Callable[[], float],
        limits: CoreLimits,
        random: random_module.Random | None = None,
        journal: Journal | None = None,
        eviction: type[Eviction] = LeastRecentlyUsed,
    ) -> None:
        self.sharing = sharing
        self.tenant_limits = tenant_limits
        super().__init__(
            TenantPool(sharing.pool),
            clock=clock,
            limits=_Limits(**attrs.asdict(limits), check_pins=self._check_pins),
            watermarks=sharing.watermarks,
            random=random,
            journal=journal,
            eviction=eviction,
        )
        self.space.index = self.committed.up_to_date
        self.space.expire_holds = self.expire_holds
        self.space.blocks_reserved = self._blocks_reserved
        self.set_limits(tenant_limits)

    def set_limits(self, tenant_limits: TenantLimits) -> None:
        """Use other limits from now on, or these in a pool that has changed."""
        self.tenant_limits = self.space.tenant_limits = tenant_limits
        sharing = self.sharing
        self.pool.capacity_bytes = sharing.room_bytes(tenant_limits.reserved_bytes, tenant_limits.max_bytes)

    def make_space(self) -> TenantSpace:
        """Make a part, which those who share the pool use, too."""
        return TenantSpace(
            *(self.sharing, self.tenant_limits, self.pool),
            *(self.pins, self.retired, self.removals, self.retention),
            watermarks=self.watermarks,
            growth=self.growth,
        )

    def resume(self, past: StoreStatistics) -> None:
        """Count on from the figures of an earlier store of this tenant, which had no
        block any more."""
        removals = self.removals
        self.hits, self.hit_bytes, self.misses = past.hits, past.hit_bytes, past.misses
        self.puts, self.put_bytes = past.puts, past.put_bytes
        removals.deleted, removals.expired = past.deleted, past.expired
        removals.checksum_drops = past.checksum_drops
        self.space.evicted = attrs.asdict(past.evicted)  # type: ignore[assignment]

    @property
    def idle(self) -> bool:
        """Whether it is empty, and nobody uses it, no disk either."""
        return not len(self) and self.journal is None and self.unused

    @property
    def unused(self) -> bool:
        """Whether nobody uses it and it takes nothing of the pool."""
        self.reclaim()
        return not self.clients and not self.pool.used_bytes

    def reclaim(self) -> None:
        """Free what waits to be free."""
        self.space.reclaim()

    def release_all_holds(self) -> None:
        """End every hold of the tenant."""
        self.holds.release_all()

    def accept_hazards(
        self, client: Client, read_hazards: Callable[[], list[Hazard]], count_unread: Callable[[], int] = lambda: 1
    ) -> None:
        """As for any store."""
        super().accept_hazards(client, read_hazards, count_unread)
        self.sharing.mapping[self.space] = None

    def close_client(self, client: Client) -> None:
        """As for any store."""
        super().close_client(client)
        if not self.hazard_pins.clients and self.space in self.sharing.mapping:
            self.reclaim()
            self.sharing.mapping.pop(self.space, None)

    def _blocks_reserved(self) -> int:
        return sum(len(reservation.extents) for client in self.clients for reservation in client.reservations)

    def _check_pins(self, wanted_bytes: int) -> None:
        space = self.space
        pinned_bytes, room_bytes = space.pinned_bytes, self.pool.capacity_bytes
        if pinned_bytes and pinned_bytes + wanted_bytes > self.max_pinned_bytes:
            raise LimitExceeded(
                f"the connections of tenant {self.tenant_limits.tenant!r} have {in_units(pinned_bytes)} leased, held or"
                f" reserved and ask for {in_units(wanted_bytes)} more, and"
                f" max_pinned_ratio={self.limits.max_pinned_ratio:g} of its {in_units(room_bytes)} bounds all together;"
                " release leases or finish writes first"
            )
        self.sharing.check_pins(space, wanted_bytes)


class Tenants:
    """The tenants that share `pool`; none at first. The other arguments are those of
    `StoreCore`."""

    def __init__(
        self,
        pool: Pool,
        *,
        clock: Callable[[], float],
        limits: CoreLimits | None = None,
        watermarks: Watermarks | None = None,
        random: random_module.Random | None = None,
        make_store: Callable[..., TenantStore] = TenantStore,
        eviction: type[Eviction] = LeastRecentlyUsed,
    ) -> None:
        self.pool = pool
        self.sharing = Sharing(pool, watermarks or Watermarks())
        self._limits: dict[str, TenantLimits] = {}
        self._stores: dict[str, TenantStore] = {}
        self._left: dict[str, TenantStore] = {}
        self._past: dict[str, StoreStatistics] = {}  # of stores that are no more, by tenants that have no other now
        self._on_removal: Callable[[Sequence[Entry]], object] | None = None
        self._clock = clock
        self._core_limits = limits or CoreLimits()
        self._random = random or random_module.SystemRandom()
        self._new_store = make_store
        self._eviction = eviction

    def __len__(self) -> int:
        """Return the number of tenants."""
        return len(self._limits)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the tenants."""
        return iter(list(self._limits))

    @property
    def leaving(self) -> int:
        """How many tenants have left whose blocks or clients are still there."""
        return len(self._left)

    def __contains__(self, tenant: str) -> bool:
        return tenant in self._limits

    def check(self, tenants: Iterable[TenantLimits]) -> None:
        """Raise ConfigError unless these could be the tenants of this pool."""
        tenants = list(tenants)
        names = [limits.tenant for limits in tenants]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"tenant {twice!r} is there twice; give each tenant once")
        if problem := why_not_reserved(tenants, self.pool.capacity_bytes):
            raise ConfigError(problem)

    def apply(self, tenants: Iterable[TenantLimits]) -> None:
        """Have these tenants from now on, with these limits.

        Those that are not among them have left. ConfigError, and nothing changed:
        `check` refuses them.
        """
        tenants = list(tenants)
        self.check(tenants)
        self._limits = {limits.tenant: limits for limits in tenants}
        self._past = {name: past for name, past in self._past.items() if name in self._limits}
        self.sharing.reserved_bytes = sum(limits.reserved_bytes for limits in tenants)
        for name in [name for name in self._stores if name not in self._limits]:
            self._left[name] = store = self._stores.pop(name)
            store.set_limits(TenantLimits(name))
        for name in [name for name in self._left if name in self._limits]:
            self._stores[name] = self._left.pop(name)
        for name, store in self._stores.items():
            store.set_limits(self._limits[name])
        self._recount()

    def limits(self, tenant: str) -> TenantLimits:
        """Return the limits of a tenant. KeyError: there is none of this name."""
        return self._limits[tenant]

    def store(self, tenant: str) -> TenantStore:
        """Return the store of a tenant. KeyError: there is none of this name."""
        store = self._stores.get(tenant)
        if store is None:
            store = self._stores[tenant] = self._make_store(self._limits[tenant])
            if (past := self._past.pop(tenant, None)) is not None:
                store.resume(past)
        return store

    def rest(self, tenant: str) -> bool:
        """Do without the store of a tenant if it is empty and nobody uses it; return
        whether that is so. Who has it must not use it any more: `store` makes another,
        which counts on."""
        store = self._stores.get(tenant)
        if store is None or not store.idle:
            return False
        self._past[tenant] = store.statistics()
        self.sharing.forget(store.space)
        del self._stores[tenant]
        return True

    @property
    def past(self) -> Mapping[str, StoreStatistics]:
        """The figures of tenants whose store is no more, by name."""
        return self._past

    def add_store(self, tenant_limits: TenantLimits, journal: Journal) -> TenantStore | None:
        """Make the store of a tenant that may not be among these yet, with a journal;
        None if it is there already."""
        tenant = tenant_limits.tenant
        if tenant in self._stores or tenant in self._left:
            return None
        store = self._stores[tenant] = self._make_store(tenant_limits, journal)
        return store

    def used_stores(self) -> dict[str, TenantStore]:
        """Return the stores of the tenants that have used theirs, by name."""
        return dict(self._stores)

    def all_stores(self) -> dict[str, TenantStore]:
        """Return the stores of all tenants that have one, also of those that have left,
        by name."""
        return {**self._stores, **self._left}

    def adopt(
        self, states: Mapping[str, PoolState], make_journal: Callable[[TenantLimits], Journal | None]
    ) -> dict[str, Adopted]:
        """Take over what tenants of an earlier process had, whose arenas this pool has;
        nobody has a block here yet.

        Who is not among the tenants any more loses all blocks. What is still in use of
        them stays in quarantine.

        Raises:
            ConfigError: something that is still in use has no place in this pool.
        """
        stores: dict[str, TenantStore] = {}
        pinned: dict[str, list[Entry]] = {}
        for name, state in states.items():
            if name in self._limits:
                limits = self._limits[name]
                stores[name] = self._stores[name] = self._make_store(limits, make_journal(limits))
            else:
                stores[name] = self._left[name] = self._make_store(TenantLimits(name))
            pinned[name] = adopt_pinned(stores[name], self._mine(name, state))
        adopted = {
            name: adopt_rest(stores[name], self._mine(name, state), pinned[name]) for name, state in states.items()
        }
        self._recount()
        return adopted

    def _mine(self, name: str, state: PoolState) -> PoolState:
        """Return what a tenant goes on with: if it has left, only what is in use."""
        if name in self._limits:
            return state
        return attrs.evolve(state, keys=[], entries=[], holds=[], ends=[], protected=[], protected_ends=[])

    def expect_hazards(self) -> None:
        """Nothing: each store does so when it is made."""

    @property
    def on_removal(self) -> Callable[[Sequence[Entry]], object] | None:
        """Called with the blocks of any tenant that lose their keys, before their
        space is reused. Set it before anything is stored: clients may then pin blocks
        without a request, and what is reserved is kept free."""
        return self._on_removal

    @on_removal.setter
    def on_removal(self, value: Callable[[Sequence[Entry]], object] | None) -> None:
        self._on_removal = value
        self.sharing.keeps_reserved = value is not None
        for store in self.all_stores().values():
            self._watch(store)

    def evict(self, low: float, high: float, cause: EvictionCause = "manual", *, max_blocks: int | None = None) -> int:
        """Evict down to `low` of the whole pool if more than `high` is used, from those
        who are most above what is reserved for them.

        Returns the number of blocks evicted; `max_blocks` bounds it. ValueError unless
        0 <= low <= high <= 1.
        """
        if not 0 <= low <= high <= 1:
            raise ValueError(f"watermarks must be 0 <= low <= high <= 1, not low={low} and high={high}")
        return self.sharing.evict(low, high, cause, max_blocks)

    def remove_left(self, max_keys: int) -> bool:
        """Remove up to `max_keys` keys of tenants that have left; return whether there
        is more to remove.

        What is pinned gives its space back with its last pin.
        """
        for name, store in list(self._left.items()):
            store.release_all_holds()
            max_keys -= store.purge(max_keys)
            if len(store):
                return True
            if store.unused:
                self.sharing.forget(store.space)
                del self._left[name]
        return False

    def _recount(self) -> None:
        spaces = [store.space for store in self.all_stores().values()]
        self.sharing.victims.rebuild(spaces)
        self.sharing.recount(spaces)

    def _make_store(self, tenant_limits: TenantLimits, journal: Journal | None = None) -> TenantStore:
        store = self._new_store(
            self.sharing,
            tenant_limits,
            clock=self._clock,
            limits=self._core_limits,
            random=self._random,
            journal=journal,
            eviction=self._eviction,
        )
        self._watch(store)
        return store

    def _watch(self, store: TenantStore) -> None:
        if self._on_removal is not None:
            store.expect_hazards()
            store.on_removal = self._on_removal


def why_not_reserved(tenants: Iterable[TenantLimits], pool_bytes: int) -> str:
    """Return why what is reserved for these tenants does not fit into the pool that
    they share; empty if it does."""
    reserved_bytes = sum(one.reserved_bytes for one in tenants)
    if reserved_bytes <= pool_bytes:
        return ""
    return (
        f"{in_units(reserved_bytes)} are reserved for tenants together, and the pool that they share has"
        f" {in_units(pool_bytes)}; reserve less, or give the server a larger pool"
    )
