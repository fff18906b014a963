"""How tenants share one pool: whose blocks go for a batch, and what each may have.

A tenant may use free space that is reserved for another. It is then above its own
reservation, and its blocks are evicted when the other tenant needs the space. At its
own limits, a tenant evicts its own blocks, the least recently used first.

The victim is the tenant that is most above its reservation, in proportion to its
weight. It gives blocks until the next one is as far above, and so on. A tenant at or
below its reservation gives nothing, except that the last block that it gives may cross
that line. The victims are in a heap, so that a choice costs O(log n) of n
tenants. What is in the heap is never below what it should be: a tenant that has grown
is listed anew, one that has shrunk is found out when it is looked at.

What is pinned cannot go. So all that tenants pin beyond what is reserved for them has
to fit beside what is reserved for all. Where clients may pin without a request
(hazards), this holds for all that tenants take: what is reserved is kept free for its
tenant.

A tenant sees the pool through a `TenantPool`: the arenas and the allocator are those of
the whole pool. What the tenant takes is counted there, and its capacity is the room
that it can have at most. So what a store works out from its pool, such as the bound on
pins, it works out for the tenant.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from math import ceil
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import attrs

from infinistore.allocators.base import AllocatorStatistics, Extent
from infinistore.core.index import Index, length_of
from infinistore.core.limits import Watermarks
from infinistore.core.pool import Pool
from infinistore.core.space import EXTRA_STEPS, FRAGMENTATION_ROUNDS, FRAGMENTATION_STEPS, EvictionCause, Space
from infinistore.errors import LimitExceeded, OutOfMemory
from infinistore.sizes import in_units
from infinistore.tenant_limits import TenantLimits

_FEW = 64


class Victim(Protocol):
    """A tenant that has blocks in a shared pool."""

    tenant_limits: TenantLimits
    listed: float
    """How far above its reserved size the heap has it; minus infinity: it is not
    there. For `Victims`."""

    @property
    def taken_bytes(self) -> int:
        """What it takes of the pool."""

    def settle(self) -> None:
        """Bring up to date what it has, and what of that is pinned."""

    def evictable_bytes(self) -> int:
        """What of that eviction could free now."""

    def piece_bytes(self) -> int:
        """What its coldest block takes; at least 1."""


_V = TypeVar("_V", bound=Victim)
_Candidate: TypeAlias = tuple[float, int, _V, int, int]
"""(minus how far above, number, tenant, bytes above what is reserved, bytes that can be
evicted). Bytes are whole, so that sums of steps are exact."""
_INFINITE = float("inf")


class Victims(Generic[_V]):
    """The tenants of one pool, by how far they are above what is reserved for them."""

    def __init__(self) -> None:
        self.looked_at = 0
        """How many tenants were looked at in order to choose, since the start."""
        self._heap: list[tuple[float, int, _V]] = []
        self._number = 0  # breaks ties: the heap never compares victims
        self._listed = 0  # tenants that are in the heap

    def note(self, victim: _V) -> None:
        """Say that a tenant has grown, or that its limits have changed."""
        limits = victim.tenant_limits
        above = (victim.taken_bytes - limits.reserved_bytes) / limits.weight
        if above > 0 and above > victim.listed:
            self._list(victim, above)

    def drop(self, victim: _V) -> None:
        """Forget a tenant."""
        if victim.listed > -_INFINITE:
            victim.listed = -_INFINITE
            self._listed -= 1

    def rebuild(self, victims: Iterable[_V]) -> None:
        """List all tenants anew: limits have changed."""
        self._heap, self._listed = [], 0
        for victim in victims:
            victim.listed = -_INFINITE
            self.note(victim)

    def plan(
        self, wanted_bytes: float, requester: _V | None = None, asked_bytes: int = 0, most_pieces: int | None = None
    ) -> dict[_V, int]:
        """Return how many bytes each victim is to give, `wanted_bytes` in all; less if
        there is no more that may be taken.

        `requester` counts as if it had what it asks for. With `most_pieces`, the plan
        has at most so many steps, each of at least a block.
        """
        gifts: dict[_V, int] = {}
        wanted_bytes = ceil(wanted_bytes)
        seen: list[_V] = []
        candidates: list[_Candidate[_V]] = []
        try:
            if requester is not None:
                self._consider(requester, asked_bytes, candidates)
            while wanted_bytes > 0 and most_pieces != 0:
                self._bring_in(requester, candidates, seen)
                if not candidates:
                    break
                above, _, victim, above_bytes, evictable_bytes = heapq.heappop(candidates)
                step_bytes = min(
                    wanted_bytes, evictable_bytes, above_bytes, self._step_bytes(-above, victim, candidates)
                )
                gifts[victim] = gifts.get(victim, 0) + step_bytes
                wanted_bytes -= step_bytes
                self._keep(victim, above_bytes - step_bytes, evictable_bytes - step_bytes, candidates)
                if most_pieces is not None:
                    most_pieces -= 1
        finally:
            for victim in seen:
                self.note(victim)
        return gifts

    def _step_bytes(self, above: float, victim: _V, candidates: list[_Candidate[_V]]) -> int:
        """Return how much the first victim gives before the next one is as far above,
        but a block at least."""
        after = max(0.0, -candidates[0][0] if candidates else 0.0, -self._heap[0][0] if self._heap else 0.0)
        return max(ceil((above - after) * victim.tenant_limits.weight), victim.piece_bytes())

    def _bring_in(self, requester: _V | None, candidates: list[_Candidate[_V]], seen: list[_V]) -> None:
        """Make candidates of those that may be above all candidates so far."""
        while self._heap and -self._heap[0][0] > (max(0.0, -candidates[0][0]) if candidates else 0.0):
            above, _, victim = heapq.heappop(self._heap)
            if -above != victim.listed:  # it was listed again since
                continue
            self.drop(victim)
            self.looked_at += 1
            seen.append(victim)
            if victim is not requester:
                self._consider(victim, 0, candidates)

    def _consider(self, victim: _V, more_bytes: int, candidates: list[_Candidate[_V]]) -> None:
        victim.settle()
        above_bytes = victim.taken_bytes + more_bytes - victim.tenant_limits.reserved_bytes
        self._keep(victim, above_bytes, victim.evictable_bytes(), candidates)

    def _keep(self, victim: _V, above_bytes: int, evictable_bytes: int, candidates: list[_Candidate[_V]]) -> None:
        if above_bytes > 0 and evictable_bytes > 0:
            self._number += 1
            above = above_bytes / victim.tenant_limits.weight
            heapq.heappush(candidates, (-above, self._number, victim, above_bytes, evictable_bytes))

    def _list(self, victim: _V, above: float) -> None:
        self._listed += victim.listed == -_INFINITE
        victim.listed = above
        self._number += 1
        heapq.heappush(self._heap, (-above, self._number, victim))
        if len(self._heap) > 2 * self._listed + _FEW:  # mostly out of date: forget those
            self._heap = [(above, number, victim) for above, number, victim in self._heap if -above == victim.listed]
            heapq.heapify(self._heap)


class Sharer(Victim, Protocol):
    """A tenant that evicts."""

    @property
    def pinned_bytes(self) -> int:
        """What its readers pin, and what its unfinished writes take."""

    @property
    def waiting_bytes(self) -> int:
        """What of its space only waits to be free."""

    def give(self, wanted_bytes: float, cause: EvictionCause, max_steps: int | None) -> int:
        """Evict its coldest blocks; return how many."""

    def reclaim(self) -> None:
        """Free what waits to be free."""


class Sharing:
    """The tenants of one pool."""

    def __init__(self, pool: Pool, watermarks: Watermarks) -> None:
        self.pool = pool
        self.watermarks = watermarks
        self.victims: Victims[Sharer] = Victims()
        self.reserved_bytes = 0
        """What is reserved for all tenants together."""
        self.mapping: dict[Sharer, None] = {}  # a set, in the order in which they came
        """Those whose clients map the pool. Only they have space that waits to be
        free."""
        self.keeps_reserved = False
        """Whether clients may pin blocks without a request."""
        self._taken_above_bytes = 0  # what all take beyond what is reserved for them
        self._draining = False  # on the way from the high watermark down to the low one
        self._above: dict[Sharer, int] = {}
        self._above_bytes = 0

    def room_bytes(self, reserved_bytes: int, max_bytes: int | None) -> int:
        """Return how much of the pool a tenant with these limits can have at most."""
        room_bytes = self.pool.capacity_bytes - self.reserved_bytes + reserved_bytes
        return room_bytes if max_bytes is None else min(room_bytes, max_bytes)

    def make_space(self, requester: Sharer, wanted_bytes: int) -> None:
        """Evict what a batch needs, and some more towards the low watermark.

        OutOfMemory, and nothing evicted: it does not fit.
        """
        watermarks, most_bytes = self.watermarks, self._most_claimed_bytes
        room_bytes = self._room_for(requester, most_bytes)
        high_bytes = watermarks.high * room_bytes - wanted_bytes
        if self.pool.used_bytes <= high_bytes and not self._draining:  # the usual case
            return
        for sharer in self.mapping:
            sharer.settle()
        if not self._make_room(requester, wanted_bytes, most_bytes):
            self.reclaim()
            if not self._make_room(requester, wanted_bytes, most_bytes):
                raise self._out_of_memory(requester, f"a batch of {in_units(wanted_bytes)} does not fit")
        if self._draining:
            low_bytes = watermarks.low * room_bytes - wanted_bytes
            gifts = self.victims.plan(self._used_bytes - low_bytes, requester, wanted_bytes, EXTRA_STEPS)
            # Done too when nobody may lose more.
            self._draining = self._take(gifts, "on_demand", EXTRA_STEPS) > 0 and self._used_bytes > low_bytes

    def _make_room(self, requester: Sharer, wanted_bytes: int, most_bytes: int) -> bool:
        """Evict for a batch down to the high watermark; return whether it fits then."""
        room_bytes = self._room_for(requester, most_bytes)
        high_bytes = self.watermarks.high * room_bytes - wanted_bytes
        if self._used_bytes > high_bytes:
            gifts = self._plan_to(high_bytes, requester, wanted_bytes)
            if sum(gifts.values()) < self._used_bytes + wanted_bytes - room_bytes:
                return False
            self._draining = True
            self._take(gifts, "on_demand", None)
        # Some may wait to be free, also of what was evicted: clients may have pinned it
        # just before.
        return not self.keeps_reserved or self.pool.used_bytes + wanted_bytes <= self._room_for(requester, most_bytes)

    def has_room(self, requester: Sharer, wanted_bytes: int) -> bool:
        """Whether a tenant may take so much more as things are."""
        return self.pool.used_bytes + wanted_bytes <= self._room_for(requester, self._most_claimed_bytes)

    @property
    def _claimed_bytes(self) -> int:
        """What all have taken or may still take of what is reserved for them."""
        return self.reserved_bytes + self._taken_above_bytes

    @property
    def _most_claimed_bytes(self) -> int:
        """How much that may be: not more than it is, if new limits have made it too
        much."""
        return max(self.pool.capacity_bytes, self._claimed_bytes)

    def _room_for(self, requester: Sharer, most_bytes: int) -> int:
        """Return how much of the pool may be taken when a tenant gets more: less than
        all of it if what is reserved for others is kept for them."""
        if not self.keeps_reserved:
            return self.pool.capacity_bytes
        own_bytes = max(0, requester.tenant_limits.reserved_bytes - requester.taken_bytes)
        return most_bytes - self._claimed_bytes + own_bytes + self.pool.used_bytes

    def note_taken(self, sharer: Sharer, before_bytes: int, now_bytes: int) -> None:
        """Note that a tenant takes more of the pool than before, or less."""
        reserved_bytes = sharer.tenant_limits.reserved_bytes
        self._taken_above_bytes += max(0, now_bytes - reserved_bytes) - max(0, before_bytes - reserved_bytes)
        if now_bytes > before_bytes:
            self.victims.note(sharer)

    def make_larger_pieces(self, requester: Sharer, wanted_bytes: int, rounds: int) -> None:
        """Evict for a batch that was refused although its bytes are free. OutOfMemory
        after the last round."""
        if rounds < FRAGMENTATION_ROUNDS:
            steps = FRAGMENTATION_STEPS >> (FRAGMENTATION_ROUNDS - rounds)
            gifts = self.victims.plan(wanted_bytes << rounds, requester, wanted_bytes, steps)
            if self._take(gifts, "fragmentation", steps):
                return
        raise self._out_of_memory(
            requester,
            f"a batch of {in_units(wanted_bytes)} does not fit into the pieces that are free, and eviction did not"
            " join enough of them (values of one size avoid this)",
        )

    def evict(self, low: float, high: float, cause: EvictionCause, max_blocks: int | None) -> int:
        """Evict down to `low` of the pool if more than `high` is used; return how many
        blocks."""
        self.reclaim()
        if self.pool.used_bytes <= high * self.pool.capacity_bytes:
            return 0
        wanted_bytes = self.pool.used_bytes - low * self.pool.capacity_bytes
        return self._take(self.victims.plan(wanted_bytes, most_pieces=max_blocks), cause, max_blocks)

    def reclaim(self) -> None:
        """Free the space of all tenants that waits to be freed."""
        for sharer in self.mapping:
            sharer.reclaim()

    def check_pins(self, sharer: Sharer, wanted_bytes: int) -> None:
        """Raise LimitExceeded if a tenant may not pin `wanted_bytes` more, because
        others could then not have what is reserved for them."""
        above_bytes = sharer.pinned_bytes + wanted_bytes - sharer.tenant_limits.reserved_bytes
        if above_bytes <= 0:
            self._note(sharer, 0)
            return
        bound_bytes = self.pool.capacity_bytes - self.reserved_bytes
        if self._others(sharer) + above_bytes > bound_bytes:
            for other in list(self._above):  # they may have released since
                other.settle()
                self._note(other, other.pinned_bytes - other.tenant_limits.reserved_bytes)
            others_bytes = self._others(sharer)
            if others_bytes + above_bytes > bound_bytes:
                raise LimitExceeded(
                    f"tenant {sharer.tenant_limits.tenant!r} asks for {in_units(wanted_bytes)} to read or write, and"
                    f" has {in_units(sharer.pinned_bytes)} leased, held or reserved; with what other tenants have, that"
                    f" is more than the {in_units(bound_bytes)} of the pool that nobody reserved; release leases or"
                    " finish writes first, or reserve less of the pool for tenants"
                )
        self._note(sharer, above_bytes)

    def recount(self, sharers: Iterable[Sharer]) -> None:
        """Count what all take and pin beyond what is reserved for them anew: limits
        have changed."""
        self._taken_above_bytes = 0
        for sharer in sharers:
            self.note_taken(sharer, 0, sharer.taken_bytes)
            self._note(sharer, sharer.pinned_bytes - sharer.tenant_limits.reserved_bytes)

    def forget(self, sharer: Sharer) -> None:
        """Forget a tenant that is gone."""
        self._note(sharer, 0)
        self.victims.drop(sharer)
        self.mapping.pop(sharer, None)

    def _others(self, sharer: Sharer) -> int:
        return self._above_bytes - self._above.get(sharer, 0)

    def _note(self, sharer: Sharer, above_bytes: int) -> None:
        self._above_bytes -= self._above.pop(sharer, 0)
        if above_bytes > 0:
            self._above[sharer] = above_bytes
            self._above_bytes += above_bytes

    @property
    def _used_bytes(self) -> int:
        """What is taken of the pool, less what only waits to be free."""
        return self.pool.used_bytes - sum(sharer.waiting_bytes for sharer in self.mapping)

    def _plan_to(self, most_bytes: float, requester: Sharer, wanted_bytes: int) -> dict[Sharer, int]:
        return self.victims.plan(self._used_bytes - most_bytes, requester, wanted_bytes)

    def _take(self, gifts: dict[Sharer, int], cause: EvictionCause, steps: int | None) -> int:
        taken = 0
        for sharer, wanted_bytes in gifts.items():
            if steps is not None and taken >= steps:
                break
            taken += sharer.give(wanted_bytes, cause, None if steps is None else steps - taken)
        return taken

    def _out_of_memory(self, requester: Sharer, what: str) -> OutOfMemory:
        limits = requester.tenant_limits
        return OutOfMemory(
            f"{what}: tenant {limits.tenant!r} has {in_units(requester.taken_bytes)} of the pool,"
            f" {in_units(limits.reserved_bytes)} are reserved for it, and nothing else can be evicted for it now;"
            " release leases and reservations sooner, write smaller batches, or reserve more for this tenant"
        )


class TenantPool(Pool):
    """A tenant's view of `whole`. `on_change` is called with what it took before, when
    it takes more or less."""

    def __init__(self, whole: Pool) -> None:
        super().__init__(whole.allocator)
        self.on_change: Callable[[int], object] = lambda before: None
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
        self.expire_holds: Callable[[], object] = lambda: None
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

    def make_space(self, index: Index, wanted_bytes: int) -> None:
        """As for any store, at the cost of any tenant."""
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
