"""Room for new blocks: what goes when the pool is full, how much at once, and when the pool should grow.

A block that loses its key while it is pinned is condemned: it keeps its room until its last pin ends.

Least recently used goes first. A pinned block that is met at the cold end is moved to the warm end: it is in use, so it
is recent. So each step costs O(1) however many blocks are pinned, and a step is what the bounds below count.

Eviction starts when a batch would fill the pool above the high watermark. It takes at once what the batch needs, and
goes on down to the low watermark a little with each batch, so that no put waits for long.

Growth is I/O, so it is not done here. `growth_wanted` says when it would help, and somebody who makes arenas listens.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Literal

from infinistore.allocators.base import Extent
from infinistore.core.index import Entry, Index
from infinistore.core.limits import Watermarks
from infinistore.core.pins import PinTable
from infinistore.core.pool import Pool
from infinistore.errors import OutOfMemory, ValueTooLarge

__all__ = ["EXTRA_STEPS", "FRAGMENTATION_ROUNDS", "FRAGMENTATION_STEPS", "EvictionCause", "Room"]

EvictionCause = Literal["on_demand", "fragmentation", "periodic", "manual"]

EXTRA_STEPS = 256
"""How many blocks one reservation looks at to bring the store from the high watermark down to the low one, beyond
those that it needs itself. The way down is walked over several reservations."""

FRAGMENTATION_ROUNDS = 4
"""How often a reservation that has room, but not in large enough pieces, evicts more and tries again. The first round
evicts as many bytes as the batch has, each further one twice as many: 15 times the batch in all."""

FRAGMENTATION_STEPS = 16_384
"""How many blocks those rounds look at together, at most."""

_SPARE_RATIO = 1 / 8
_EXTENT = itemgetter(0, 1, 2)


class Room:
    """The pool's room, shared by blocks that have a key, blocks that are pinned, and reservations."""

    def __init__(self, pool: Pool, index: Index, pins: PinTable, watermarks: Watermarks) -> None:
        self.reserved_bytes = 0
        """The footprints of all open reservations."""
        self.evicted: Counter[EvictionCause] = Counter()
        """Blocks evicted since the start, by cause."""
        self.growable_bytes = 0
        """How much larger the pool may still become."""
        self.growth_wanted = False
        """A batch had to evict, or was refused, while the pool could still grow."""
        self.on_growth_wanted: Callable[[], object] | None = None
        """Called when `growth_wanted` becomes true."""
        self.condemned: set[Entry] = set()
        """Blocks that are pinned but have no key any more."""
        self.on_removal: Callable[[Sequence[Entry]], object] | None = None
        """Called with blocks that lose their keys, before their room is used again."""
        self.look_at_pins: Callable[[], object] = _nothing
        """Brings the pins up to date that clients have set and taken away by themselves."""
        self._pool = pool
        self._index = index
        self._pins = pins
        self._watermarks = watermarks
        self._draining = False  # on the way from the high watermark down to the low one

    def reserve(self, sizes: Sequence[int], footprint_bytes: int) -> list[Extent]:
        """Take one extent per size, evicting as needed; `footprint_bytes` is what they take together.

        OutOfMemory: they do not fit beside what is pinned and reserved, and nothing was evicted; or the free room is
        in too small pieces, and a bounded amount was.
        """
        self._make_room(footprint_bytes)
        extents = self._pool.allocate(sizes)
        rounds = 0
        while extents is None:
            self._make_larger_pieces(footprint_bytes, rounds)
            extents = self._pool.allocate(sizes)
            rounds += 1
        self.reserved_bytes += footprint_bytes
        return extents

    def reserve_spare(self, sizes: Sequence[int], footprint_bytes: int) -> list[Extent] | None:
        """Take one extent per size if nothing has to go for it, now or soon; else None.

        That is: the pool stays below the high watermark, and all that is reserved below an eighth of it.
        """
        capacity_bytes = self._pool.capacity_bytes
        if (
            self._pool.used_bytes + footprint_bytes > self._watermarks.high * capacity_bytes
            or self.reserved_bytes + footprint_bytes > _SPARE_RATIO * capacity_bytes
        ):
            return None
        extents = self._pool.allocate(sizes)
        if extents is not None:
            self.reserved_bytes += footprint_bytes
        return extents

    def check_sizes(self, sizes: Sequence[int], max_value_bytes: int | None) -> None:
        """Raise ValueError for a size of 0 or less, ValueTooLarge for one that can never be placed."""
        if not sizes:
            return
        smallest = largest = sizes[0]
        if sizes.count(smallest) != len(sizes):
            smallest, largest = min(sizes), max(sizes)
        if smallest <= 0:
            raise ValueError(f"a value must have at least one byte, not {smallest}")
        if max_value_bytes is not None and largest > max_value_bytes:
            raise ValueTooLarge(f"a value of {largest} bytes is above the limit max_value_bytes={max_value_bytes}")
        # No block spans two arenas, so the largest value is what the largest arena, or one still to come, can place.
        bound_bytes = max(self._pool.largest_arena_bytes, self.growable_bytes)
        if self._pool.footprint(largest) > bound_bytes:
            raise ValueTooLarge(
                f"a value of {largest} bytes is larger than the pool can ever place ({bound_bytes} bytes in one piece);"
                " split it, or give the server a larger pool"
            )

    def tell_removal(self, entries: list[Entry]) -> None:
        """Tell that blocks have lost their keys, which `drop` gives back afterwards."""
        if entries and self.on_removal is not None:
            self.on_removal(entries)

    def remove(self, entries: list[Entry]) -> None:
        """Tell that blocks have lost their keys, and give them back."""
        self.tell_removal(entries)
        self.drop(entries)

    def drop(self, entries: list[Entry]) -> None:
        """Free blocks that have lost their key, as was told: now, or with their last pin."""
        self.look_at_pins()
        pinned = self._pins.counts
        if pinned and not pinned.keys().isdisjoint(entries):
            self.condemned.update(entry for entry in entries if entry in pinned)
            entries = [entry for entry in entries if entry not in pinned]
        self._pool.free(list(map(_EXTENT, entries)))

    def unpin(self, entries: Sequence[Entry], footprint_bytes: int) -> None:
        """Take one pin from each block, and free those that are condemned and have none left."""
        ended = self._pins.remove(entries, footprint_bytes)
        if self.condemned and not self.condemned.isdisjoint(ended):
            gone = [entry for entry in ended if entry in self.condemned]
            self.condemned.difference_update(gone)
            self._pool.free(list(map(_EXTENT, gone)))

    def evict(self, wanted_bytes: float, cause: EvictionCause, max_steps: int | None = None) -> int:
        """Evict the coldest blocks that are not pinned until `wanted_bytes` of the pool are free again.

        Stops earlier when nothing is left to evict, or `max_steps` blocks were looked at. Returns blocks evicted.
        """
        self.look_at_pins()
        wanted_bytes = min(wanted_bytes, self._evictable_bytes())
        if wanted_bytes <= 0:
            return 0
        steps = len(self._index) if max_steps is None else min(max_steps, len(self._index))
        entries = self._take_coldest(wanted_bytes, steps)
        self.remove(entries)
        self.evicted[cause] += len(entries)
        return len(entries)

    def want_growth(self) -> None:
        """Say that a larger pool would help, if it may grow at all."""
        if self.growable_bytes > 0 and not self.growth_wanted:
            self.growth_wanted = True
            if self.on_growth_wanted is not None:
                self.on_growth_wanted()

    def _make_room(self, wanted_bytes: int) -> None:
        """Evict what a batch needs, and a little more on the way down to the low watermark."""
        pool, watermarks = self._pool, self._watermarks
        if wanted_bytes > pool.capacity_bytes - self._pins.bytes - self.reserved_bytes:
            self.want_growth()
            raise self._out_of_memory(f"a batch of {wanted_bytes} bytes does not fit")
        high_bytes = watermarks.high * pool.capacity_bytes - wanted_bytes
        if pool.used_bytes > high_bytes:
            self.want_growth()
            self._draining = True
            self.evict(pool.used_bytes - high_bytes, "on_demand")
        if self._draining:
            low_bytes = watermarks.low * pool.capacity_bytes - wanted_bytes
            self.evict(pool.used_bytes - low_bytes, "on_demand", EXTRA_STEPS)
            # Done too when only pinned blocks are left: else the store would keep nothing until their pins end.
            self._draining = pool.used_bytes > low_bytes and self._evictable_bytes() > 0

    def _evictable_bytes(self) -> int:
        return self._pool.used_bytes - self._pins.bytes - self.reserved_bytes

    def _make_larger_pieces(self, wanted_bytes: int, rounds: int) -> None:
        """Evict for a batch that was refused although its bytes are free; OutOfMemory after the last round."""
        self.want_growth()
        if rounds < FRAGMENTATION_ROUNDS:
            steps = FRAGMENTATION_STEPS >> (FRAGMENTATION_ROUNDS - rounds)
            if self.evict(wanted_bytes << rounds, "fragmentation", steps):
                return
        raise self._out_of_memory(
            f"a batch of {wanted_bytes} bytes does not fit into the pieces that are free, and eviction did not join"
            " enough of them (values of one size avoid this)"
        )

    def _take_coldest(self, wanted_bytes: float, steps: int) -> list[Entry]:
        """Take entries out of the index until they make up `wanted_bytes`, in so many steps at most."""
        taken: list[Entry] = []
        pop_item = self._index.pop_item
        pinned = self._pins.counts
        length = footprint_bytes = 0
        for _ in range(steps):
            key, entry = pop_item(False)  # the coldest
            if pinned and entry in pinned:
                self._index.put_warmest(key, entry)
                continue
            taken.append(entry)
            if entry[2] != length:  # most blocks are as long as the one before
                length = entry[2]
                footprint_bytes = self._pool.footprint(length)
            wanted_bytes -= footprint_bytes
            if wanted_bytes <= 0:
                break
        return taken

    def _out_of_memory(self, what: str) -> OutOfMemory:
        remedy = (
            "the pool may still grow: try again in a moment"
            if self.growable_bytes > 0
            else "release leases and reservations sooner, write smaller batches, or give the server a larger pool"
        )
        return OutOfMemory(
            f"{what}: of {self._pool.capacity_bytes} bytes in the pool, {self._pins.bytes} are pinned by readers and"
            f" {self.reserved_bytes} by unfinished writes; {remedy}"
        )


def _nothing() -> None:
    """What there is to be brought up to date where no client sets pins by itself."""
