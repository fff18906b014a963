"""How tenants share one pool: whose blocks go for a batch, and what all may pin.

A tenant may use what is free, whoever it is reserved for: then it is above what is
reserved for it, and its blocks go when the others come. What is pinned cannot go. So
all that tenants pin beyond what is reserved for them has to fit beside what is reserved
for all. Where clients may pin without a request (hazards), this holds for all that
tenants take: what is reserved is kept free for its tenant.

Leaves to others: what a tenant may take at most, and which of its blocks go
(`tenant_space`).
"""

from collections.abc import Iterable
from typing import Protocol

from infinistore.core.limits import Watermarks
from infinistore.core.pool import Pool
from infinistore.core.space import EXTRA_STEPS, FRAGMENTATION_ROUNDS, FRAGMENTATION_STEPS, EvictionCause
from infinistore.core.victims import Victim, Victims
from infinistore.errors import LimitExceeded, OutOfMemory
from infinistore.sizes import in_units

__all__ = ["Sharer", "Sharing"]


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

    def make_space(self, asking: Sharer, wanted_bytes: int) -> None:
        """Evict what a batch needs, and some more towards the low watermark.

        OutOfMemory, and nothing evicted: it does not fit.
        """
        watermarks, most_bytes = self.watermarks, self._most_claimed_bytes
        room_bytes = self._room_for(asking, most_bytes)
        high_bytes = watermarks.high * room_bytes - wanted_bytes
        if self.pool.used_bytes <= high_bytes and not self._draining:  # the usual case
            return
        for sharer in self.mapping:
            sharer.settle()
        if not self._make_room(asking, wanted_bytes, most_bytes):
            self.reclaim()
            if not self._make_room(asking, wanted_bytes, most_bytes):
                raise self._out_of_memory(asking, f"a batch of {in_units(wanted_bytes)} does not fit")
        if self._draining:
            low_bytes = watermarks.low * room_bytes - wanted_bytes
            gifts = self.victims.plan(self._used_bytes - low_bytes, asking, wanted_bytes, EXTRA_STEPS)
            # Done too when nobody may lose more.
            self._draining = self._take(gifts, "on_demand", EXTRA_STEPS) > 0 and self._used_bytes > low_bytes

    def _make_room(self, asking: Sharer, wanted_bytes: int, most_bytes: int) -> bool:
        """Evict for a batch down to the high watermark; return whether it fits then."""
        room_bytes = self._room_for(asking, most_bytes)
        high_bytes = self.watermarks.high * room_bytes - wanted_bytes
        if self._used_bytes > high_bytes:
            gifts = self._plan_to(high_bytes, asking, wanted_bytes)
            if sum(gifts.values()) < self._used_bytes + wanted_bytes - room_bytes:
                return False
            self._draining = True
            self._take(gifts, "on_demand", None)
        # Some may wait to be free, also of what was evicted: clients may have pinned it
        # just before.
        return not self.keeps_reserved or self.pool.used_bytes + wanted_bytes <= self._room_for(asking, most_bytes)

    def has_room(self, asking: Sharer, wanted_bytes: int) -> bool:
        """Whether a tenant may take so much more as things are."""
        return self.pool.used_bytes + wanted_bytes <= self._room_for(asking, self._most_claimed_bytes)

    @property
    def _claimed_bytes(self) -> int:
        """What all have taken or may still take of what is reserved for them."""
        return self.reserved_bytes + self._taken_above_bytes

    @property
    def _most_claimed_bytes(self) -> int:
        """How much that may be: not more than it is, if new limits have made it too
        much."""
        return max(self.pool.capacity_bytes, self._claimed_bytes)

    def _room_for(self, asking: Sharer, most_bytes: int) -> int:
        """Return how much of the pool may be taken when a tenant gets more: less than
        all of it if what is reserved for others is kept for them."""
        if not self.keeps_reserved:
            return self.pool.capacity_bytes
        own_bytes = max(0, asking.tenant_limits.reserved_bytes - asking.taken_bytes)
        return most_bytes - self._claimed_bytes + own_bytes + self.pool.used_bytes

    def note_taken(self, sharer: Sharer, before_bytes: int, now_bytes: int) -> None:
        """Note that a tenant takes more of the pool than before, or less."""
        reserved_bytes = sharer.tenant_limits.reserved_bytes
        self._taken_above_bytes += max(0, now_bytes - reserved_bytes) - max(0, before_bytes - reserved_bytes)
        if now_bytes > before_bytes:
            self.victims.note(sharer)

    def make_larger_pieces(self, asking: Sharer, wanted_bytes: int, rounds: int) -> None:
        """Evict for a batch that was refused although its bytes are free. OutOfMemory
        after the last round."""
        if rounds < FRAGMENTATION_ROUNDS:
            steps = FRAGMENTATION_STEPS >> (FRAGMENTATION_ROUNDS - rounds)
            gifts = self.victims.plan(wanted_bytes << rounds, asking, wanted_bytes, steps)
            if self._take(gifts, "fragmentation", steps):
                return
        raise self._out_of_memory(
            asking,
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
        """Free what waits to be free, whoever it is of."""
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

    def _plan_to(self, most_bytes: float, asking: Sharer, wanted_bytes: int) -> dict[Sharer, int]:
        return self.victims.plan(self._used_bytes - most_bytes, asking, wanted_bytes)

    def _take(self, gifts: dict[Sharer, int], cause: EvictionCause, steps: int | None) -> int:
        taken = 0
        for sharer, wanted_bytes in gifts.items():
            if steps is not None and taken >= steps:
                break
            taken += sharer.give(wanted_bytes, cause, None if steps is None else steps - taken)
        return taken

    def _out_of_memory(self, asking: Sharer, what: str) -> OutOfMemory:
        limits = asking.tenant_limits
        return OutOfMemory(
            f"{what}: tenant {limits.tenant!r} has {in_units(asking.taken_bytes)} of the pool,"
            f" {in_units(limits.reserved_bytes)} are reserved for it, and nothing else can be evicted for it now;"
            " release leases and reservations sooner, write smaller batches, or reserve more for this tenant"
        )
