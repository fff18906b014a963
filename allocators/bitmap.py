"""The default strategy: one bit per unit, searched in C.

A block takes a run of whole units. Two bit arrays hold all there is to know: which
units are taken, and at which ones an extent starts.

Where blocks go decides how full the pool can be, because the store evicts in order of
use and not in order of place:

- Blocks of one unit are interchangeable. They take the next free units after those
  placed last; a batch is one search.
- Larger blocks take the holes that fit best: the shortest ones that are long enough.
  Measured against next fit and first fit, this leaves the least room unusable
  (docs/allocators.md).
- A batch of small blocks goes into one hole if there is one near. A batch of large ones
  does not ask for that: moving it as one span gains nothing, and it would use up the
  holes that the largest blocks need.
- Where most blocks are large and less than a quarter of the pool is free, small ones
  take the shortest holes too, and leave the long ones to blocks that need them.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, islice, repeat
from operator import floordiv
from typing import ClassVar

from bitarray import bitarray
from bitarray.util import zeros

from infinistore.allocators.base import Allocator, AllocatorStatistics, Extent
from infinistore.allocators.runs import UnitMap

_SMALL_BLOCK_BYTES = 512 * 1024
"""Smaller blocks gain from lying side by side: they move, or register, as one span."""


class BitmapAllocator(Allocator):
    """Runs of units in a bitmap. `largest_free_extent_bytes` is exact; a footprint is
    the size rounded up to units.

    A batch that fits into one hole is never refused.
    """

    name: ClassVar[str] = "bitmap"

    def __init__(self, unit_bytes: int) -> None:
        super().__init__(unit_bytes)
        self._map = UnitMap()
        self._starts = bitarray()
        self._extents = 0
        self._next = 0
        self._units_freed = 0
        self._look_again_at = 0
        self._look_from = 0

    def add_arena(self, index: int, length: int) -> None:
        """Add an arena of whole units."""
        self.record_arena(index, length)
        self._map.add_arena(length // self.unit_bytes)
        self._starts.extend(zeros(len(self._map.taken) - len(self._starts)))
        self._starts[-1] = 1  # the separator ends whatever lies before it
        self._look_again_at = 0

    def footprint(self, size: int) -> int:
        """Return `size` rounded up to whole units."""
        return -(-size // self.unit_bytes) * self.unit_bytes

    def allocate(self, sizes: Sequence[int]) -> list[Extent] | None:
        """Place small blocks in one hole if there is one, else where each fits."""
        if not sizes:
            return []
        count = len(sizes)
        size = sizes[0]
        equal = sizes.count(size) == count
        if (size if equal else min(sizes)) <= 0:
            raise ValueError(f"a block must have at least one byte, got {min(sizes)}")
        unit_bytes = self.unit_bytes
        if equal and size <= unit_bytes:
            if count > self._map.free_units:
                return None
            if self._is_crowded():
                starts = self._fill_crumbs(count)
            else:
                first = self._next_units(count)
                if first is not None:
                    return self._take_in_a_row(first, count, size)
                starts = self._place_single_units(count)
        else:
            placed = self._place_runs([-(-size // unit_bytes) for size in sizes])
            if placed is None:
                return None
            starts = placed
        self._starts[starts] = 1
        self._extents += count
        self._next = starts[-1] + 1
        return self._extents_at(starts, [size] * count if equal else sizes)

    def _is_crowded(self) -> bool:
        """Whether most of the pool holds blocks of several units, and room is short."""
        free, units = self._map.free_units, self._map.units
        return 4 * free < units and self._extents * 4 < units - free

    def _fill_crumbs(self, count: int) -> list[int]:
        starts = self._map.best_fits(1, count)
        assert starts is not None  # that many units are free
        self._map.take_each(starts)
        return starts

    def _next_units(self, count: int) -> int | None:
        """Return the first of the next free units, if they lie in a row."""
        taken = self._map.taken
        first = taken.find(0, self._next)
        if first < 0 or taken.find(1, first, first + count) >= 0:  # the separator after the last arena is taken, too
            return None
        return first

    def _take_in_a_row(self, first: int, count: int, size: int) -> list[Extent]:
        """Place blocks of a unit each side by side, without a look at each."""
        self._map.take_run(first, count)
        end = self._next = first + count
        self._extents += count
        arena = self._map.arena_of(first)
        base, unit_bytes = self._map.firsts[arena], self.unit_bytes
        if count == 1:
            self._starts[first] = 1
            return [(arena, (first - base) * unit_bytes, size)]
        self._starts[first:end] = 1
        offsets = range((first - base) * unit_bytes, (end - base) * unit_bytes, unit_bytes)
        return list(zip(repeat(arena), offsets, repeat(size), strict=False))

    def _place_single_units(self, count: int) -> list[int]:
        taken = self._map.taken
        starts = list(islice(taken.search(0, self._next), count))
        if len(starts) < count:
            starts += islice(taken.search(0, 0, self._next), count - len(starts))
        if starts[-1] - starts[0] != count - 1:
            first = self._one_hole(count)
            if first is not None:
                starts = list(range(first, first + count))
        self._map.take_each(starts)
        return starts

    def _one_hole(self, units: int) -> int | None:
        """Return a hole for a whole batch, or None; a far one may be missed."""
        if self._units_freed < self._look_again_at or units > self._map.free_units:
            return None
        first, self._look_from = self._map.hole_near(units, self._look_from)
        if first is None:
            # in a pool of small holes this fails every time: go on from there, after a
            # few batches that do not look
            self._look_again_at = self._units_freed + 4 * units
        return first

    def _place_runs(self, units: list[int]) -> list[int] | None:
        total = sum(units)
        if total > self._map.free_units:
            return None
        if not self._is_crowded() and total < len(units) * _SMALL_BLOCK_BYTES // self.unit_bytes:
            first = self._one_hole(total)
            if first is not None:
                return self._take_neighbours(first, units)
        starts = [0] * len(units)
        done: list[tuple[int, int]] = []
        for length in sorted(set(units), reverse=True):
            wanted = [index for index, value in enumerate(units) if value == length]
            # large blocks take the best of all holes that are low in the pool; there
            # are too many for small ones
            large = length * self.unit_bytes >= _SMALL_BLOCK_BYTES
            found = self._map.best_fits(length, len(wanted), 0 if large else self._next)
            if found is None:
                for first, taken in done:
                    self._map.give_back_run(first, taken)
                first, _ = next(self._map.holes(total), (None, 0)) if done else (None, 0)
                return None if first is None else self._take_neighbours(first, units)
            for index, first in zip(wanted, found, strict=True):
                self._map.take_run(first, length)
                done.append((first, length))
                starts[index] = first
        return starts

    def _take_neighbours(self, first: int, units: list[int]) -> list[int]:
        self._map.take_run(first, sum(units))
        return list(accumulate(units[:-1], initial=first))

    def _extents_at(self, starts: list[int], sizes: Sequence[int]) -> list[Extent]:
        unit_bytes = self.unit_bytes
        firsts = self._map.firsts
        if len(firsts) == 1:
            return [(0, start * unit_bytes, size) for start, size in zip(starts, sizes, strict=True)]
        arena = self._map.arena_of(min(starts))
        if max(starts) < self._map.ends[arena]:
            base = firsts[arena]
            return [(arena, (start - base) * unit_bytes, size) for start, size in zip(starts, sizes, strict=True)]
        arenas = map(self._map.arena_of, starts)
        return [
            (arena, (start - firsts[arena]) * unit_bytes, size)
            for arena, start, size in zip(arenas, starts, sizes, strict=True)
        ]

    def adopt(self, extents: Sequence[Extent]) -> list[bool]:
        """Take those extents that begin at a unit and are free."""
        return list(map(self._adopt, extents))

    def _adopt(self, extent: Extent) -> bool:
        arena, offset, length = extent
        units = self._map
        if not 0 <= arena < len(units.firsts) or offset < 0 or offset % self.unit_bytes or length <= 0:
            return False
        first = units.firsts[arena] + offset // self.unit_bytes
        count = -(-length // self.unit_bytes)
        if first + count > units.ends[arena] or units.taken.find(1, first, first + count) >= 0:
            return False
        units.take_run(first, count)
        self._starts[first] = 1
        self._extents += 1
        return True

    def free(self, extents: Iterable[Extent]) -> None:
        """Give back extents; all are checked before the first is freed."""
        extents = list(extents)
        if not extents:
            return
        starts = self._single_units_of(extents) if len(extents) > 1 else None
        if isinstance(starts, range):
            self._map.give_back_run(starts[0], len(starts))
            self._starts[starts[0] : starts[-1] + 1] = 0
            self._units_freed += len(starts)
        elif starts is not None:
            self._map.give_back_each(starts)
            self._starts[starts] = 0
            self._units_freed += len(starts)
        else:
            runs = [self._run_of(extent) for extent in extents]
            if len(dict(runs)) != len(runs):
                raise ValueError("an extent is freed twice in one call")
            for start, units in runs:
                self._map.give_back_run(start, units)
                self._starts[start] = 0
                self._units_freed += units
        self._extents -= len(extents)

    def _single_units_of(self, extents: list[Extent]) -> list[int] | range | None:
        """Return the units of allocated extents of one unit each in one arena, checked
        together; None: check each.

        A range if they lie in a row, as those do that were placed together: a third of
        the time.
        """
        arenas, offsets, lengths = zip(*extents, strict=True)
        arena = arenas[0]
        units = self._map
        unit_bytes = self.unit_bytes
        if not 0 <= arena < len(units.firsts) or arenas.count(arena) != len(arenas):
            return None
        if lengths.count(lengths[0]) != len(lengths) or not 0 < lengths[0] <= unit_bytes or min(offsets) < 0:
            return None
        base = units.firsts[arena]
        if offsets == tuple(range(offsets[0], offsets[0] + len(offsets) * unit_bytes, unit_bytes)):
            first, last = base + offsets[0] // unit_bytes, base + offsets[-1] // unit_bytes
            if offsets[0] % unit_bytes or last >= units.ends[arena] or self._starts.find(0, first, last + 1) >= 0:
                return None
            # None of them is the beginning of a longer extent: the last one, because it
            # ends where the next begins.
            if not self._starts[last + 1] and units.taken[last + 1]:
                return None
            return range(first, last + 1)
        starts = list(map(floordiv, offsets, repeat(unit_bytes)))
        if base:
            starts = [base + start for start in starts]
        aligned = sum(offsets) == (sum(starts) - base * len(starts)) * unit_bytes
        if not aligned or max(starts) >= units.ends[arena] or len(set(starts)) != len(starts):
            return None
        if not self._starts[starts].all():
            return None
        if self._extents != units.units - units.free_units:  # some extents are longer: is it one of these?
            after = [start + 1 for start in starts]
            if not (self._starts[after] | ~units.taken[after]).all():
                return None
        return starts

    def _run_of(self, extent: Extent) -> tuple[int, int]:
        """Return the first unit and the length of an extent; ValueError if none."""
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
        raise ValueError(f"{extent} is not an allocated extent: it was freed before, or never given out")

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
            largest_free_extent_bytes=units.largest_hole() * self.unit_bytes,
        )

    def occupied_bytes(self, index: int, parts: int) -> list[int]:
        """Return the bytes taken in each of `parts` equal parts of an arena."""
        return [units * self.unit_bytes for units in self._map.taken_in(index, parts)]
