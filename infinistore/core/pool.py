"""Arenas and an allocator: where blocks live, as memory.

The allocator decides which extent (arena, offset, length) a block gets. The pool turns
extents into views of the arenas' bytes and counts what is allocated.

Promises: `used_bytes` is the sum of the footprints of all extents handed out, and what
`allocate` refused changed nothing. Leaves to others: who may use an extent and for how
long (the store), and making arenas (the server).
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from operator import add

from infinistore.allocators.base import Allocator, AllocatorStatistics, Extent
from infinistore.core.arena import Arena
from infinistore.core.index import Entry, arena_of, length_of, offset_of


class Pool:
    """The memory of one store: arenas, and the allocator that places blocks there."""

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        self.arenas: list[Arena] = []
        self.capacity_bytes = 0
        """What blocks can take at most: the arenas' lengths, less what the allocator
        cannot use at their ends."""
        self.largest_arena_bytes = 0
        """The usable length of the longest arena. No block can be larger, because none
        spans two arenas."""
        self.used_bytes = 0
        """The sum of the footprints of the extents that are taken."""
        self.footprint = lru_cache(maxsize=4096)(allocator.footprint)
        """footprint(size_bytes) -> bytes of pool that a block of that size takes.
        Cached: stores see few sizes."""

    def add_arena(self, arena: Arena) -> None:
        """Use `arena` until `close`. ValueError if its index is not the next one."""
        if arena.index != len(self.arenas):
            raise ValueError(f"the next arena of this pool must have index {len(self.arenas)}, not {arena.index}")
        self.allocator.add_arena(arena.index, arena.length)
        self.footprint.cache_clear()  # a strategy may choose its sizes when it sees the first arena
        self.arenas.append(arena)
        capacity_bytes = self.allocator.statistics().capacity_bytes
        self.largest_arena_bytes = max(self.largest_arena_bytes, capacity_bytes - self.capacity_bytes)
        self.capacity_bytes = capacity_bytes

    def footprints(self, sizes: Sequence[int]) -> int:
        """Return how many bytes of pool blocks of these sizes take together."""
        if sizes and sizes.count(sizes[0]) == len(sizes):  # the usual case, and five times faster
            return self.footprint(sizes[0]) * len(sizes)
        return sum(map(self.footprint, sizes))

    def allocate(self, sizes: Sequence[int]) -> list[Extent] | None:
        """Allocate one extent per size (bytes, positive), in order.

        None, and nothing allocated, if they do not all fit.
        """
        extents = self.allocator.allocate(sizes)
        if extents is not None:
            self.used_bytes += self.footprints(sizes)
        return extents

    def adopt(self, extents: Sequence[Extent]) -> list[bool]:
        """Take extents of an earlier process; say for each whether it is taken now."""
        adopted = self.allocator.adopt(extents)
        lengths = [extent[2] for extent, taken in zip(extents, adopted, strict=True) if taken]
        self.used_bytes += self.footprints(lengths)
        return adopted

    def free(self, extents: Sequence[Extent]) -> None:
        """Free extents. ValueError, and no change, if one is not allocated."""
        self.allocator.free(extents)
        self.used_bytes -= self.footprints(list(map(length_of, extents)))

    def view(self, extent: Extent | Entry) -> memoryview:
        """Return the bytes of one extent, writable."""
        arena, offset, length = extent[:3]
        return self.arenas[arena].memory[offset : offset + length]

    def views(self, extents: Sequence[Extent], *, writable: bool) -> list[memoryview]:
        """Return the bytes of each extent, in order."""
        memory = self._memory(writable)
        return [memory[arena][offset : offset + length] for arena, offset, length in extents]

    def merged_views(self, extents: Sequence[Extent] | Sequence[Entry], *, writable: bool = True) -> list[memoryview]:
        """Return the bytes of the extents, in order, with adjacent extents joined.

        Two extents are adjacent if the second starts where the first ends, in the same
        arena.
        """
        if not extents:
            return []
        memory = self._memory(writable)
        arenas = list(map(arena_of, extents))
        offsets = list(map(offset_of, extents))
        ends = list(map(add, offsets, map(length_of, extents)))
        if offsets[1:] == ends[:-1] and arenas.count(arenas[0]) == len(arenas):
            return [memory[arenas[0]][offsets[0] : ends[-1]]]
        firsts = [
            i
            for i in range(1, len(extents))
            if offsets[i] != ends[i - 1] or arenas[i] != arenas[i - 1]  # a hole, or another arena
        ]
        return [memory[arenas[i]][offsets[i] : ends[j - 1]] for i, j in pairwise([0, *firsts, len(extents)])]

    def statistics(self) -> AllocatorStatistics:
        """Return the allocator's own statistics."""
        return self.allocator.statistics()

    def close(self) -> None:
        """Close every arena; idempotent. Views stay valid (see `Arena.close`)."""
        for arena in self.arenas:
            arena.close()

    def _memory(self, writable: bool) -> list[memoryview]:
        return [arena.memory if writable else arena.read_only for arena in self.arenas]
