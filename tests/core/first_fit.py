"""The simplest allocator that keeps the contract: the reference for the others, and for the store's own tests.

Free room is a sorted list of spans per arena; each block takes the first span that is large enough. Nothing is fast.
"""

from bisect import insort
from collections.abc import Iterable, Sequence

from infinistore.allocators.base import Allocator, AllocatorStatistics, Extent


class FirstFitAllocator(Allocator):
    """First fit in arena order, spans merged when freed."""

    name = "first-fit"

    def __init__(self, unit_bytes: int) -> None:
        super().__init__(unit_bytes)
        self._capacities: list[int] = []
        self._free: list[list[tuple[int, int]]] = []  # per arena, sorted (start, end)
        self._taken: dict[tuple[int, int], int] = {}  # (arena, offset) -> footprint

    def add_arena(self, index: int, length: int) -> None:
        if index != len(self._capacities) or length < 0:
            raise ValueError(f"arena {index} of {length} bytes is out of turn or negative")
        usable = length // self.unit_bytes * self.unit_bytes
        self._capacities.append(usable)
        self._free.append([(0, usable)] if usable else [])

    def allocate(self, sizes: Sequence[int]) -> list[Extent] | None:
        if any(size <= 0 for size in sizes):
            raise ValueError("a block must have at least one byte")
        extents: list[Extent] = []
        for size in sizes:
            extent = self._place(size)
            if extent is None:
                self.free(extents)
                return None
            extents.append(extent)
        return extents

    def _place(self, size: int) -> Extent | None:
        wanted = self.footprint(size)
        for arena, spans in enumerate(self._free):
            for position, (start, end) in enumerate(spans):
                if end - start >= wanted:
                    spans[position : position + 1] = [(start + wanted, end)] if end - start > wanted else []
                    self._taken[arena, start] = wanted
                    return arena, start, size
        return None

    def free(self, extents: Iterable[Extent]) -> None:
        extents = list(extents)
        places = [(arena, offset) for arena, offset, _ in extents]
        if len(set(places)) != len(places) or any(
            self._taken.get((arena, offset)) != self.footprint(length) for arena, offset, length in extents
        ):
            raise ValueError(f"not all of these are allocated: {extents}")
        for arena, offset in places:
            insort(self._free[arena], (offset, offset + self._taken.pop((arena, offset))))
            merged: list[tuple[int, int]] = []
            for start, end in self._free[arena]:
                if merged and merged[-1][1] == start:
                    start = merged.pop()[0]  # noqa: PLW2901
                merged.append((start, end))
            self._free[arena] = merged

    def footprint(self, size: int) -> int:
        return -(-size // self.unit_bytes) * self.unit_bytes

    def statistics(self) -> AllocatorStatistics:
        return AllocatorStatistics(
            name=self.name,
            unit_bytes=self.unit_bytes,
            arenas=len(self._capacities),
            capacity_bytes=sum(self._capacities),
            used_bytes=sum(self._taken.values()),
            extents=len(self._taken),
            largest_free_extent_bytes=max((end - start for spans in self._free for start, end in spans), default=0),
        )
