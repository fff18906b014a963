"""The default strategy: one bit per unit, searched in C.

A block takes a run of whole units. The blocks of one inference engine are all of one size, which is the unit when the
server is set up for it: such a batch is placed by one search for free bits that starts where the last one ended. Two
bit arrays hold all there is to know, one for the units that are taken and one for the units where an extent starts.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import ClassVar

from bitarray import bitarray
from bitarray.util import zeros

from infinistore.allocators.base import Allocator, AllocatorStatistics, Extent
from infinistore.allocators.runs import UnitMap

__all__ = ["BitmapAllocator"]


class BitmapAllocator(Allocator):
    """Runs of units in a bitmap. `largest_free_extent_bytes` is exact; a footprint is the size rounded up to units."""

    name: ClassVar[str] = "bitmap"

    def __init__(self, unit_bytes: int) -> None:
        super().__init__(unit_bytes)
        self._map = UnitMap()
        self._starts = bitarray()
        self._extents = 0
        self._next = 0

    def add_arena(self, index: int, length: int) -> None:
        """Add an arena of whole units."""
        if index != len(self._map.firsts) or length < 0:
            raise ValueError(f"arena {len(self._map.firsts)} is next, got arena {index} of {length} bytes")
        self._map.add_arena(length // self.unit_bytes)
        self._starts.extend(zeros(len(self._map.taken) - len(self._starts)))
        self._starts[-1] = 1  # the separator ends whatever lies before it

    def footprint(self, size: int) -> int:
        """Return `size` rounded up to whole units."""
        return -(-size // self.unit_bytes) * self.unit_bytes

    def allocate(self, sizes: Sequence[int]) -> list[Extent] | None:
        """Place a batch, in one run if there is one that is long enough."""
        if not sizes:
            return []
        if min(sizes) <= 0:
            raise ValueError(f"a block must have at least one byte, got {min(sizes)}")
        unit_bytes = self.unit_bytes
        units = [-(-size // unit_bytes) for size in sizes]
        total = sum(units)
        if total > self._map.free_units:
            return None
        if total == len(units):
            starts = self._place_single_units(total)
        else:
            placed = self._place_runs(units, total)
            if placed is None:
                return None
            starts = placed
        self._starts[starts] = 1
        self._extents += len(starts)
        return self._extents_at(starts, sizes)

    def _place_single_units(self, count: int) -> list[int]:
        taken = self._map.taken
        starts = list(islice(taken.search(0, self._next), count))
        if len(starts) < count:
            starts += islice(taken.search(0, 0, self._next), count - len(starts))
        if starts[-1] - starts[0] != count - 1 and (run := self._map.find_run(count, self._next)) >= 0:
            starts = list(range(run, run + count))
        taken[starts] = 1
        self._map.free_units -= count
        self._next = starts[-1] + 1
        return starts

    def _place_runs(self, units: list[int], total: int) -> list[int] | None:
        first = self._map.find_run(total, self._next)
        if first >= 0:
            self._map.take(first, total)
            self._next = first + total
            return [first + before for before in _sums_before(units)]
        starts: list[int] = []
        for count in units:
            first = self._map.find_run(count, self._next)
            if first < 0:
                for start, length in zip(starts, units, strict=False):
                    self._map.give_back(start, length)
                return None
            self._map.take(first, count)
            self._next = first + count
            starts.append(first)
        return starts

    def _extents_at(self, starts: list[int], sizes: Sequence[int]) -> list[Extent]:
        unit_bytes = self.unit_bytes
        firsts = self._map.firsts
        if len(firsts) == 1:
            return [(0, start * unit_bytes, size) for start, size in zip(starts, sizes, strict=True)]
        arenas = [self._map.arena_of(start) for start in starts]
        return [
            (arena, (start - firsts[arena]) * unit_bytes, size)
            for arena, start, size in zip(arenas, starts, sizes, strict=True)
        ]

    def free(self, extents: Iterable[Extent]) -> None:
        """Give back extents; all are checked before the first is freed."""
        runs = [self._run_of(extent) for extent in extents]
        if len({start for start, _ in runs}) != len(runs):
            raise ValueError("an extent is freed twice in one call")
        for start, units in runs:
            self._map.give_back(start, units)
            self._starts[start] = 0
        self._extents -= len(runs)

    def _run_of(self, extent: Extent) -> tuple[int, int]:
        """Return the first unit of an allocated extent and how many it has; ValueError if it is not one."""
        arena, offset, length = extent
        units = -(-length // self.unit_bytes)
        firsts = self._map.firsts
        if 0 <= arena < len(firsts) and offset >= 0 and offset % self.unit_bytes == 0 and units > 0:
            start = firsts[arena] + offset // self.unit_bytes
            end = start + units
            taken, starts = self._map.taken, self._starts
            if (
                end <= self._map.ends[arena]
                and starts[start]
                and taken.find(0, start, end) < 0
                and starts.find(1, start + 1, end) < 0
                and (starts[end] or not taken[end])
            ):
                return start, units
        raise ValueError(f"{extent} is not an allocated extent")

    def statistics(self) -> AllocatorStatistics:
        """Return what is held now; the largest free extent is exact."""
        units = self._map
        return AllocatorStatistics(
            name=self.name,
            unit_bytes=self.unit_bytes,
            arenas=len(units.firsts),
            capacity_bytes=units.units * self.unit_bytes,
            used_bytes=(units.units - units.free_units) * self.unit_bytes,
            extents=self._extents,
            largest_free_extent_bytes=units.largest_run() * self.unit_bytes,
        )


def _sums_before(values: list[int]) -> list[int]:
    total = 0
    sums = []
    for value in values:
        sums.append(total)
        total += value
    return sums
