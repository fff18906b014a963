"""The parts of a store that a simulation buggifies: each does at times what it may do,
and seldom does.

`parts` returns them, or the usual ones if there is no `Buggify`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from infinistore.allocators.base import Extent
from infinistore.buggify import Buggify, Point
from infinistore.core.clients import Client, Lease, Reservation
from infinistore.core.committed import Written
from infinistore.core.index import Index
from infinistore.core.pins import MOST_WAITING_RATIO, Retired
from infinistore.core.reads import Reads
from infinistore.core.removals import Removals
from infinistore.core.sharing import TenantSpace
from infinistore.core.space import EvictionCause, Space
from infinistore.core.writes import Writes

_FEW = 3


class Parts(NamedTuple):
    """What makes the parts of a store."""

    retired: Callable[..., Retired] = Retired
    removals: Callable[..., Removals] = Removals
    space: Callable[..., Space] = Space
    writes: Callable[..., Writes] = Writes
    reads: Callable[..., Reads] = Reads


def parts(buggify: Buggify | None) -> Parts:
    """Return what makes the parts of a store."""
    if buggify is None:
        return Parts()
    return Parts(
        partial(_Retired, buggify),
        partial(_Removals, buggify),
        partial(_Space, buggify),
        partial(_Writes, buggify),
        partial(_Reads, buggify),
    )


def tenant_space(buggify: Buggify | None) -> Callable[..., TenantSpace]:
    """Return what makes the space of a tenant."""
    return TenantSpace if buggify is None else partial(_TenantSpace, buggify)


class _Retired(Retired):
    def __init__(self, buggify: Buggify, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._buggify = buggify

    def scan_for(self, entries: Sequence[Any]) -> bool:
        may_wait = self.stored is not None and self.waiting_bytes <= MOST_WAITING_RATIO * self._pool.capacity_bytes
        if may_wait and self._buggify(Point.LONGER_WAIT):
            return False
        return super().scan_for(entries)

    def tidy(self) -> None:
        if self._buggify(Point.EARLY_RECLAIM):
            self.reclaim()
        super().tidy()


class _Removals(Removals):
    def __init__(self, buggify: Buggify, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._buggify = buggify

    def purge(self, index: Index, max_keys: int | None) -> int:
        if max_keys is not None and max_keys > 1 and self._buggify(Point.SHORT_SLICE):
            max_keys = 1 + self._buggify.random.randrange(min(_FEW, max_keys - 1))
        return super().purge(index, max_keys)

    def _slice_keys(self) -> int:
        if self._buggify(Point.SHORT_SLICE):
            return 1 + self._buggify.random.randrange(_FEW)
        return super()._slice_keys()


class _Space(Space):
    def __init__(self, buggify: Buggify, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._buggify = buggify
        self._allocate = self._allocate_badly

    def _allocate_badly(self, sizes: Sequence[int]) -> list[Extent] | None:
        if sizes and self._buggify(Point.ALLOCATION_REFUSED):
            return None
        if len(sizes) > 1 and self._buggify(Point.SCATTERED_BATCH):
            return self._allocate_apart(sizes)
        return self._pool.allocate(sizes)

    def _allocate_apart(self, sizes: Sequence[int]) -> list[Extent] | None:
        places: dict[int, Extent] = {}
        for position in self._buggify.random.sample(range(len(sizes)), len(sizes)):
            placed = self._pool.allocate([sizes[position]])
            if placed is None:
                self._pool.free(list(places.values()))
                return None
            places[position] = placed[0]
        return [places[position] for position in range(len(sizes))]

    def _make_space(self, index: Index, wanted_bytes: int) -> None:
        if self._buggify(Point.EARLY_EVICTION):
            self.evict(index, wanted_bytes, "on_demand", 1 + self._buggify.random.randrange(_FEW))
        super()._make_space(index, wanted_bytes)

    def evict(self, index: Index, wanted_bytes: float, cause: EvictionCause, max_steps: int | None = None) -> int:
        if max_steps is not None and max_steps > 1 and self._buggify(Point.SHORT_SLICE):
            max_steps = 1 + self._buggify.random.randrange(min(_FEW, max_steps - 1))
        return super().evict(index, wanted_bytes, cause, max_steps)

    def reserve_spare(self, sizes: Sequence[int], footprint_bytes: int) -> list[Extent] | None:
        if self._buggify(Point.SPARE_REFUSED):
            return None
        return super().reserve_spare(sizes, footprint_bytes)


class _TenantSpace(_Space, TenantSpace):
    pass


class _Writes(Writes):
    def __init__(self, buggify: Buggify, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._buggify = buggify

    def prepare(self, reservation: Reservation, keys: Sequence[str], written: Written) -> bool:
        if self._buggify(Point.PREPARE_REFUSED):
            return False
        return super().prepare(reservation, keys, written)


class _Reads(Reads):
    def __init__(self, buggify: Buggify, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._buggify = buggify

    def lease(self, client: Client, keys: Sequence[str], max_bytes: int | None, *, touch: bool) -> Lease:
        if max_bytes is not None and len(keys) > 1 and self._buggify(Point.SHORT_ANSWER):
            max_bytes = 1
        return super().lease(client, keys, max_bytes, touch=touch)
