"""The space of one tenant: what it may take at most, and what it gives to others.

At its limits, a tenant evicts its own blocks, the least recently used first. Below
them, it gets space as `sharing` says.
"""

from collections.abc import Callable, Sequence
from typing import Any

from infinistore.allocators.base import Extent
from infinistore.core.index import Index, length_of
from infinistore.core.sharing import Sharing
from infinistore.core.space import EvictionCause, Space
from infinistore.core.tenant_pool import TenantPool
from infinistore.errors import LimitExceeded
from infinistore.sizes import in_units
from infinistore.tenant_limits import TenantLimits

__all__ = ["TenantSpace"]

_ALL = 1 << 62  # bytes


class TenantSpace(Space):
    """The space of one tenant in the pool that `sharing` is about.

    `others` and `options` are those of `Space`. Whoever makes it sets `index`,
    `expire_holds` and `blocks_reserved`.
    """

    def __init__(
        self, sharing: Sharing, tenant_limits: TenantLimits, pool: TenantPool, *others: Any, **options: Any
    ) -> None:
        super().__init__(pool, *others, **options)
        self.tenant_limits = tenant_limits
        self.listed = float("-inf")
        self.index: Callable[[], Index] = Index
        """Returns the index of the tenant, up to date."""
        self.expire_holds: Callable[[], object] = _nothing
        """Ends the holds whose time is over."""
        self.blocks_reserved: Callable[[], int] = int
        """Returns how many blocks its unfinished writes have."""
        self._sharing = sharing
        pool.on_change = self._note_change

    # What it asks for

    def reserve(self, index: Index, sizes: Sequence[int], footprint_bytes: int) -> list[Extent]:
        """As for any store. LimitExceeded, and nothing evicted: the tenant is at its
        limit, and nothing of its own can be evicted for this."""
        if self.tenant_limits.max_keys is not None:
            self._make_keys(index, len(sizes), self.tenant_limits.max_keys)
        if self.tenant_limits.max_bytes is not None:
            self._make_own_space(index, footprint_bytes, self.tenant_limits.max_bytes)
        return super().reserve(index, sizes, footprint_bytes)

    def reserve_spare(self, sizes: Sequence[int], footprint_bytes: int) -> list[Extent] | None:
        """As for any store; None also if it would bring the tenant to a limit."""
        whole, most_keys = self._sharing.pool, self.tenant_limits.max_keys
        if (
            whole.used_bytes + footprint_bytes > self._watermarks.high * whole.capacity_bytes
            or not self._sharing.has_room(self, footprint_bytes)
            or (most_keys is not None and len(self.index()) + self.blocks_reserved() + len(sizes) > most_keys)
        ):
            return None
        return super().reserve_spare(sizes, footprint_bytes)

    def _make_space(self, index: Index, wanted_bytes: int) -> None:
        self._sharing.make_space(self, wanted_bytes)

    def _make_larger_pieces(self, index: Index, wanted_bytes: int, rounds: int) -> None:
        self._sharing.make_larger_pieces(self, wanted_bytes, rounds)

    def _reclaim(self) -> None:
        self._sharing.reclaim()

    def _make_keys(self, index: Index, count: int, most: int) -> None:
        """Evict keys until `count` more are within `most`."""
        excess = len(index) + self.blocks_reserved() + count - most
        if excess <= 0:
            return
        self._retired.reclaim()  # so that every pinned block has a key, or is condemned
        unpinned = len(index) - len(self._pins.counts) + len(self._retired.condemned)
        if excess > unpinned:
            raise self._too_many_keys(index, count, most)
        left = len(index)
        while excess > 0 and left > 0:
            left -= excess
            keys, entries = self._coldest(index, _ALL, excess)
            self._removals.remove(index, keys, entries)
            self.evicted["on_demand"] += len(keys)
            excess -= len(keys)
        if excess > 0:  # readers have pinned the rest meanwhile
            raise self._too_many_keys(index, count, most)

    def _too_many_keys(self, index: Index, count: int, most: int) -> LimitExceeded:
        return LimitExceeded(
            f"tenant {self.tenant_limits.tenant!r} has {len(index)} of max_keys={most} keys, and"
            f" {count} more do not fit beside those that are pinned or being written; release leases or finish writes"
            " first, write smaller batches, or raise max_keys"
        )

    def _make_own_space(self, index: Index, wanted_bytes: int, most_bytes: int) -> None:
        """Evict blocks until `wanted_bytes` more are within `most_bytes`."""
        if self._pool.used_bytes + wanted_bytes <= most_bytes:
            return
        self._retired.scan_some()
        if wanted_bytes > most_bytes - self.pinned_bytes:
            self._retired.reclaim()
            if wanted_bytes > most_bytes - self.pinned_bytes:
                raise LimitExceeded(
                    f"tenant {self.tenant_limits.tenant!r} may take max_bytes={in_units(most_bytes)}, has"
                    f" {in_units(self.pinned_bytes)} leased, held or being written, and asks for"
                    f" {in_units(wanted_bytes)} more; release leases or finish writes first, write smaller batches, or"
                    " raise max_bytes"
                )
        self.evict(index, self._used_bytes + wanted_bytes - most_bytes, "on_demand")

    # What it gives

    @property
    def taken_bytes(self) -> int:
        """What it takes of the pool."""
        return self._pool.used_bytes

    @property
    def pinned_bytes(self) -> int:
        """What its readers pin, and what its unfinished writes take."""
        return self._pins.bytes + self.reserved_bytes

    @property
    def waiting_bytes(self) -> int:
        """What of its space only waits to be free."""
        return self._retired.waiting_bytes

    def settle(self) -> None:
        """Bring up to date what it has, and what of that is pinned."""
        self.index()
        self.expire_holds()
        self._retired.scan_some()
        self._retired.tidy()

    def evictable_bytes(self) -> int:
        """What of its space eviction could free now."""
        return self._evictable_bytes()

    def piece_bytes(self) -> int:
        """What its coldest block takes; 1 if it has none."""
        return self._pool.footprint(next(map(length_of, self.index().entries()), 1))

    def give(self, wanted_bytes: float, cause: EvictionCause, max_steps: int | None) -> int:
        """Evict its coldest blocks; return how many."""
        return self.evict(self.index(), wanted_bytes, cause, max_steps)

    def reclaim(self) -> None:
        """Free what waits to be free."""
        self.expire_holds()
        self._retired.reclaim()

    def _note_change(self, before_bytes: int) -> None:
        self._sharing.note_taken(self, before_bytes, self._pool.used_bytes)


def _nothing() -> None:
    """End nothing."""
