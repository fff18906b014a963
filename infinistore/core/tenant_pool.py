"""One tenant's view of a pool that several tenants share.

The arenas and the allocator are those of the whole pool. What the tenant takes is
counted here, and its capacity is the room that it can have at most. So what a store
works out from its pool, such as the bound on pins, it works out for the tenant.
"""

from collections.abc import Callable, Sequence

import attrs

from infinistore.allocators.base import AllocatorStatistics, Extent
from infinistore.core.pool import Pool

__all__ = ["TenantPool"]


class TenantPool(Pool):
    """A tenant's view of `whole`. `on_change` is called with what it took before, when
    it takes more or less."""

    def __init__(self, whole: Pool) -> None:
        super().__init__(whole.allocator)
        self.on_change: Callable[[int], object] = _nothing
        self._whole = whole
        self._extents = 0
        self.arenas = whole.arenas
        self.footprint = whole.footprint
        self.largest_arena_bytes = whole.largest_arena_bytes
        self.capacity_bytes = whole.capacity_bytes

    def allocate(self, sizes: Sequence[int]) -> list[Extent] | None:
        """As for the whole pool."""
        extents = self._whole.allocate(sizes)
        if extents is not None:
            before = self.used_bytes
            self.used_bytes += self.footprints(sizes)
            self._extents += len(extents)
            self.on_change(before)
        return extents

    def adopt(self, extents: Sequence[Extent]) -> list[bool]:
        """As for the whole pool."""
        own_before, before = self.used_bytes, self._whole.used_bytes
        adopted = self._whole.adopt(extents)
        self.used_bytes += self._whole.used_bytes - before
        self._extents += sum(adopted)
        self.on_change(own_before)
        return adopted

    def free(self, extents: Sequence[Extent]) -> None:
        """As for the whole pool."""
        own_before, before = self.used_bytes, self._whole.used_bytes
        self._whole.free(extents)
        self.used_bytes -= before - self._whole.used_bytes
        self._extents -= len(extents)
        self.on_change(own_before)

    def statistics(self) -> AllocatorStatistics:
        """What the tenant has of the pool, as if nobody else had anything."""
        free_bytes = max(0, self.capacity_bytes - self.used_bytes)
        return attrs.evolve(
            self._whole.statistics(),
            capacity_bytes=self.capacity_bytes,
            used_bytes=self.used_bytes,
            extents=self._extents,
            largest_free_extent_bytes=min(self.largest_arena_bytes, free_bytes),
        )

    def close(self) -> None:
        """Does nothing: the arenas are those of the whole pool."""


def _nothing(before: int) -> None:
    """Tell nobody."""
