"""An allocator of your own: first fit, and the tests that it has to pass.

    pip install hypothesis
    python examples/first_fit_allocator.py

Each block takes the first free span that is large enough. To use such a class with
`--allocator first-fit`, name it in your package's metadata:

    [project.entry-points."infinistore.allocators"]
    first-fit = "your_package:FirstFitAllocator"
"""

import sys
from bisect import insort
from collections.abc import Iterable, Sequence
from typing import ClassVar

from infinistore.allocators import Allocator, AllocatorStatistics, Extent


class FirstFitAllocator(Allocator):
    """First fit in the order of arenas, with sorted lists of free spans. Not fast."""

    name: ClassVar[str] = "first-fit"

    def __init__(self, unit_bytes: int) -> None:
        super().__init__(unit_bytes)
        self._capacity_bytes = 0
        self._free: list[list[tuple[int, int]]] = []  # (start, end), sorted, one list for each arena
        self._taken: dict[tuple[int, int], int] = {}  # (arena, offset) -> footprint

    def add_arena(self, index: int, length: int) -> None:
        """Add an arena of whole units."""
        self.record_arena(index, length)  # ValueError if it is out of turn
        usable = length // self.unit_bytes * self.unit_bytes
        self._capacity_bytes += usable
        self._free.append([(0, usable)] if usable else [])

    def footprint(self, size: int) -> int:
        """Return `size` rounded up to whole units."""
        return -(-size // self.unit_bytes) * self.unit_bytes

    def allocate(self, sizes: Sequence[int]) -> list[Extent] | None:
        """Place all blocks, or none."""
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
        """Give extents back: check all of them first, then free them."""
        extents = list(extents)
        places = [(arena, offset) for arena, offset, _ in extents]
        if len(set(places)) != len(places) or any(
            self._taken.get((arena, offset)) != self.footprint(length) for arena, offset, length in extents
        ):
            raise ValueError(f"not all of these are allocated: {extents}")
        for arena, offset in places:
            insort(self._free[arena], (offset, offset + self._taken.pop((arena, offset))))
        for arena in {arena for arena, _ in places}:
            self._free[arena] = _merged(self._free[arena])

    def statistics(self) -> AllocatorStatistics:
        """Return what is allocated now."""
        return AllocatorStatistics(
            name=self.name,
            unit_bytes=self.unit_bytes,
            arenas=len(self._free),
            capacity_bytes=self._capacity_bytes,
            used_bytes=sum(self._taken.values()),
            extents=len(self._taken),
            largest_free_extent_bytes=max((end - start for spans in self._free for start, end in spans), default=0),
        )


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return sorted spans with neighbours that touch made one."""
    merged: list[tuple[int, int]] = []
    for start, end in spans:
        if merged and merged[-1][1] == start:
            merged[-1] = merged[-1][0], end
        else:
            merged.append((start, end))
    return merged


if __name__ == "__main__":
    try:
        from infinistore.allocators.contract import AllocatorContract, broken_rules
    except ImportError:
        sys.exit("the contract of allocators needs Hypothesis: pip install hypothesis")

    class FirstFit(AllocatorContract):
        """In a test file this would be `TestFirstFit`, and pytest would run it."""

        allocator = FirstFitAllocator

    broken = broken_rules(FirstFit)
    for test, message in broken.items():
        print(f"{test}: {message}")
    print("the contract is broken" if broken else "first-fit keeps the contract")
