"""All tenants of a server as one store, for its operator: statistics, metrics, purges
and evictions of everything.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import attrs

from infinistore.core.pool import Pool
from infinistore.core.space import EvictionCause
from infinistore.core.store import StoreCore
from infinistore.core.tenant_store import TenantStore
from infinistore.core.tenants import Tenants
from infinistore.statistics import StoreStatistics, summed_store

__all__ = ["WholeStore"]


class WholeStore(StoreCore):
    """The stores of all tenants of these groups. It has no keys of its own, and nobody
    writes to it. Arenas are shown if there is one group."""

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
        """Commit what clients have written, and pin what they read, without a
        request."""
        for store in self._stores():
            store.catch_up()

    def statistics(self) -> StoreStatistics:
        """Return the sum of what all tenants have."""
        allocators = [pool.statistics() for pool in self._pools]
        allocator = attrs.evolve(
            allocators[0],
            arenas=sum(one.arenas for one in allocators),
            capacity_bytes=sum(one.capacity_bytes for one in allocators),
            used_bytes=sum(one.used_bytes for one in allocators),
            extents=sum(one.extents for one in allocators),
            largest_free_extent_bytes=max(one.largest_free_extent_bytes for one in allocators),
        )
        past = chain.from_iterable(group.past.values() for group in self._groups)
        total = summed_store([*(store.statistics() for store in self._stores()), *past] or [super().statistics()])
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
