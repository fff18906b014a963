"""Space for new blocks: what is evicted for them, and how much at once; and whether a
larger pool would help.

The coldest blocks go first; a strategy keeps them in order (`infinistore.eviction`). A
pinned block at the cold end moves to the warm end. So each step costs O(1), however
many blocks are pinned. The bounds below count steps.

Eviction starts when a batch would fill the pool above the high watermark. It takes at
once what the batch needs, and goes on to the low watermark a little with each batch, so
that no put waits for long.

To make an arena is I/O, so the store only says when it would help (`Growth`). While
`growable_bytes` is positive and a reservation had to evict, or was refused, `wanted` is
set and `on_wanted` is called once. Somebody then makes an arena and calls
`StoreCore.add_arena`, which clears it (or `stop`, if there is no memory). Meanwhile,
what does not fit is OutOfMemory.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from math import ceil
from typing import Literal, get_args

from infinistore.allocators.base import Extent
from infinistore.core.index import Entry, Index, length_of
from infinistore.core.limits import Watermarks
from infinistore.core.pins import PinTable, Retired
from infinistore.core.pool import Pool
from infinistore.core.removals import Removals
from infinistore.core.retention import Retention
from infinistore.errors import OutOfMemory, ValueTooLarge
from infinistore.sizes import in_units


class Growth:
    """How a pool may grow: by `growable_bytes` in all."""

    __slots__ = ("growable_bytes", "on_wanted", "wanted")

    def __init__(self, growable_bytes: int = 0, on_wanted: Callable[[], object] | None = None) -> None:
        self.growable_bytes = growable_bytes
        """How much larger the pool may still become: as set, less what was added
        since."""
        self.wanted = False
        """A reservation had to evict, or was refused, while the pool could still
        grow."""
        self.on_wanted = on_wanted
        """Called, without arguments, each time that `wanted` becomes true."""

    def want(self) -> None:
        """Say that a larger pool would help, if it may grow at all."""
        if self.growable_bytes > 0 and not self.wanted:
            self.wanted = True
            if self.on_wanted is not None:
                self.on_wanted()

    def added(self, arena_bytes: int) -> None:
        """Note that the pool has grown."""
        self.growable_bytes = max(0, self.growable_bytes - arena_bytes)
        self.wanted = False

    def stop(self) -> None:
        """Say that the pool stays as it is, because there is no memory for another
        arena."""
        self.growable_bytes = 0
        self.wanted = False


EvictionCause = Literal["on_demand", "fragmentation", "periodic", "manual"]

EXTRA_STEPS = 256
"""How many blocks one reservation looks at to bring the store from the high watermark
down to the low one, beyond those that it needs itself. The way down is walked over
several reservations."""

FRAGMENTATION_ROUNDS = 4
"""How often a reservation evicts more and tries again when the free space is in too
small pieces. The first round evicts as many bytes as the batch has, each further one
twice as many: 15 times the batch in all."""

FRAGMENTATION_STEPS = 16_384
"""How many blocks those rounds look at together, at most."""

_SPARE_RATIO = 1 / 8


class Space:
    """The space of the pool: blocks with a key, pinned blocks, reservations."""

    def __init__(
        self,
        pool: Pool,
        pins: PinTable,
        retired: Retired,
        removals: Removals,
        retention: Retention,
        *,
        watermarks: Watermarks,
        growth: Growth,
    ) -> None:
        self.reserved_bytes = 0
        """The footprints of all open reservations."""
        self.evicted: dict[EvictionCause, int] = dict.fromkeys(get_args(EvictionCause), 0)
        """Blocks evicted since the start, by cause."""
        self._pool = pool
        self._allocate = pool.allocate
        self._pins = pins
        self._retired = retired
        self._removals = removals
        self._retention = retention
        self._watermarks = watermarks
        self._growth = growth
        self._draining = False  # on the way from the high watermark down to the low one

    def reserve(self, index: Index, sizes: Sequence[int], footprint_bytes: int) -> list[Extent]:
        """Allocate one extent per size, evicting as needed.

        `footprint_bytes` is what they take together. OutOfMemory: they do not fit
        beside what is pinned and reserved, and nothing was evicted; or the free space
        is too fragmented, and a bounded amount was.
        """
        self.make_space(index, footprint_bytes)
        extents = self._allocate(sizes)
        if extents is None and self._retired.stored is not None:  # space may be waiting there
            self._reclaim()
            extents = self._allocate(sizes)
        rounds = 0
        while extents is None:
            self._make_larger_pieces(index, footprint_bytes, rounds)
            self._reclaim()
            extents = self._allocate(sizes)
            rounds += 1
        self.reserved_bytes += footprint_bytes
        return extents

    def reserve_spare(self, sizes: Sequence[int], footprint_bytes: int) -> list[Extent] | None:
        """Allocate one extent per size; None if this would cause eviction, now or soon.

        That is, the pool stays below the high watermark, and all reservations together
        below an eighth of it.
        """
        capacity_bytes = self._pool.capacity_bytes
        if (
            self._pool.used_bytes + footprint_bytes > self._watermarks.high * capacity_bytes
            or self.reserved_bytes + footprint_bytes > _SPARE_RATIO * capacity_bytes
        ):
            return None
        extents = self._allocate(sizes)
        if extents is not None:
            self.reserved_bytes += footprint_bytes
        return extents

    def check_sizes(self, sizes: Sequence[int], max_value_bytes: int | None) -> None:
        """Raise ValueError for a size of 0 or less.

        ValueTooLarge for a size that can never be placed, or is above the limit.
        """
        if not sizes:
            return
        smallest = largest = sizes[0]
        if sizes.count(smallest) != len(sizes):
            smallest, largest = min(sizes), max(sizes)
        if smallest <= 0:
            raise ValueError(f"a value must have at least one byte, not {smallest}")
        if max_value_bytes is not None and largest > max_value_bytes:
            raise ValueTooLarge(
                f"a value of {in_units(largest)} is above the limit max_value_bytes={in_units(max_value_bytes)}"
            )
        # No block spans two arenas, so the largest value is what the largest arena, or
        # one still to come, can place.
        bound_bytes = max(self._pool.largest_arena_bytes, self._growth.growable_bytes)
        if self._pool.footprint(largest) > bound_bytes:
            raise ValueTooLarge(
                f"a value of {in_units(largest)} is larger than the pool can ever place ({in_units(bound_bytes)} in one"
                " piece); split it, or give the server a larger pool"
            )

    def evict(self, index: Index, wanted_bytes: float, cause: EvictionCause, max_steps: int | None = None) -> int:
        """Evict the coldest unpinned blocks until `wanted_bytes` are free again.

        Stops when nothing is left to evict, or `max_steps` blocks were examined.
        Returns the number of blocks evicted.
        """
        wanted_bytes = min(wanted_bytes, self._evictable_bytes())
        if wanted_bytes <= 0:
            return 0
        keys, entries = self._coldest(index, wanted_bytes, len(index) if max_steps is None else max_steps)
        self._removals.remove(index, keys, entries)
        self.evicted[cause] += len(entries)
        return len(entries)

    def evict_keys(self, index: Index, keys: Sequence[str]) -> int:
        """Evict the blocks of these keys that are not protected; return how many.
        Pinned ones give their space back with their last pin."""
        keys = self._retention.without_protected(keys)
        evicted = self._removals.remove(index, keys, list(filter(None, index.get_many(keys))))
        self.evicted["manual"] += evicted
        return evicted

    def make_space(self, index: Index, wanted_bytes: int) -> None:
        """Evict what a batch needs, and some more towards the low watermark."""
        pool, watermarks = self._pool, self._watermarks
        high_bytes = watermarks.high * pool.capacity_bytes - wanted_bytes
        if pool.used_bytes <= high_bytes and not self._draining:  # the usual case
            return
        if self._draining or self._used_bytes > high_bytes:
            self._retired.scan_some()
        if not self._fits(wanted_bytes):
            self._retired.reclaim()
            if not self._fits(wanted_bytes):
                self._growth.want()
                raise self._out_of_memory(f"a batch of {in_units(wanted_bytes)} does not fit")
        if self._used_bytes > high_bytes:
            self._growth.want()
            self._draining = True
            self.evict(index, self._used_bytes - high_bytes, "on_demand")
        if self._draining:
            low_bytes = watermarks.low * pool.capacity_bytes - wanted_bytes
            self.evict(index, self._used_bytes - low_bytes, "on_demand", EXTRA_STEPS)
            # Done too when only pinned blocks are left: else the store would keep
            # nothing until their pins end.
            self._draining = self._used_bytes > low_bytes and self._evictable_bytes() > 0

    def _reclaim(self) -> None:
        """Free what waits to be free."""
        self._retired.reclaim()

    def _fits(self, wanted_bytes: int) -> bool:
        return wanted_bytes <= self._pool.capacity_bytes - self._pins.bytes - self.reserved_bytes

    @property
    def _used_bytes(self) -> int:
        """What is taken of the pool, less what only waits to be free."""
        return self._pool.used_bytes - self._retired.waiting_bytes

    def _evictable_bytes(self) -> int:
        return self._used_bytes - self._pins.bytes - self.reserved_bytes

    def _make_larger_pieces(self, index: Index, wanted_bytes: int, rounds: int) -> None:
        """Evict for a batch that was refused although its bytes are free.

        OutOfMemory after the last round.
        """
        self._growth.want()
        if rounds < FRAGMENTATION_ROUNDS:
            steps = FRAGMENTATION_STEPS >> (FRAGMENTATION_ROUNDS - rounds)
            if self.evict(index, wanted_bytes << rounds, "fragmentation", steps):
                return
        raise self._out_of_memory(
            f"a batch of {in_units(wanted_bytes)} does not fit into the pieces that are free, and eviction did not"
            " join enough of them (values of one size avoid this)"
        )

    def _coldest(self, index: Index, wanted_bytes: float, steps: int) -> tuple[list[str], list[Entry]]:
        """Return the coldest keys that are not pinned and make up `wanted_bytes`.

        Their entries, too. Examines at most `steps` blocks, and makes pinned ones the
        most recent.
        """
        pinned = self._pins.counts
        entries = self._walk(index, wanted_bytes, steps)
        keys = index.coldest(len(entries))
        if pinned and not pinned.keys().isdisjoint(entries):
            index.pass_over([key for key, entry in zip(keys, entries, strict=True) if entry in pinned][::-1])
            keys = [key for key, entry in zip(keys, entries, strict=True) if entry not in pinned]
            entries = [entry for entry in entries if entry not in pinned]
        return keys, entries

    def _walk(self, index: Index, wanted_bytes: float, steps: int) -> list[Entry]:
        """Return the coldest entries until the unpinned ones make up `wanted_bytes`.

        At most `steps`.
        """
        pinned = self._pins.counts
        length = next(map(length_of, index.entries()), 1)
        footprint_bytes = self._pool.footprint(length)
        entries = list(islice(index.entries(), min(steps, ceil(wanted_bytes / footprint_bytes))))
        lengths = list(map(length_of, entries))
        if lengths.count(length) == len(lengths) and (not pinned or pinned.keys().isdisjoint(entries)):
            return entries  # the usual case, and five times faster
        entries = []
        for entry in islice(index.entries(), steps):
            entries.append(entry)
            if pinned and entry in pinned:
                continue
            if length_of(entry) != length:  # most blocks are as long as the one before
                length = length_of(entry)
                footprint_bytes = self._pool.footprint(length)
            wanted_bytes -= footprint_bytes
            if wanted_bytes <= 0:
                break
        return entries

    def _out_of_memory(self, what: str) -> OutOfMemory:
        remedy = (
            "the pool may still grow: try again in a moment"
            if self._growth.growable_bytes > 0
            else "release leases and reservations sooner, write smaller batches, or give the server a larger pool"
        )
        return OutOfMemory(
            f"{what}: of {in_units(self._pool.capacity_bytes)} in the pool, {in_units(self._pins.bytes)} are pinned by"
            f" readers and {in_units(self.reserved_bytes)} by unfinished writes; {remedy}"
        )
