"""A map of equal units, taken or free, over several arenas, and the search for free runs in it.

The bitmap strategy keeps one map of units, the slab strategy one map of pages. All arenas lie in one bit array, with a
taken bit between two of them, so that one search in C covers all and no run crosses from one arena into the next. The
map promises that a search for a run is exact (it finds one if there is one) and that a failing search is cheap; where
in the map to put what is left to the strategies.
"""

from bisect import bisect_right
from collections.abc import Iterator

from bitarray import bitarray
from bitarray.util import zeros

__all__ = ["UnitMap"]

_SHORT_RUN_UNITS = 64
"""Runs below this are found by shifting the map against itself, longer ones by looking for zero bytes first."""


class UnitMap:
    """Which units are taken. A unit is named by its index in the whole map, which counts the separators too."""

    def __init__(self) -> None:
        self.taken = bitarray()
        """One bit per unit: 1 is taken (or a separator)."""
        self.firsts: list[int] = []
        """The first unit of each arena."""
        self.ends: list[int] = []
        """The separator after the last unit of each arena."""
        self.units = 0
        """How many units there are."""
        self.free_units = 0
        """How many of them are free; whoever changes `taken` keeps it right."""
        self._impossible_units = 1
        """No free run is this long or longer, by the last failing search; forgotten when units are freed."""

    def add_arena(self, units: int) -> None:
        """Append an arena of `units` free units."""
        self.firsts.append(len(self.taken))
        self.taken.extend(zeros(units))
        self.ends.append(len(self.taken))
        self.taken.append(1)
        self.units += units
        self.freed(units)

    def arena_of(self, unit: int) -> int:
        """Return the arena that `unit` lies in."""
        return bisect_right(self.firsts, unit) - 1

    def take(self, first: int, units: int) -> None:
        """Mark a run of free units as taken."""
        self.taken[first : first + units] = 1
        self.free_units -= units

    def give_back(self, first: int, units: int) -> None:
        """Mark a run of taken units as free."""
        self.taken[first : first + units] = 0
        self.freed(units)

    def freed(self, units: int) -> None:
        """Say that `units` bits were cleared: what a failing search has found out before no longer holds."""
        self.free_units += units
        self._impossible_units = self.units + 1

    def run_start(self, unit: int) -> int:
        """Return the first unit of the free run that the free unit `unit` lies in."""
        return self.taken.find(1, 0, unit, right=True) + 1

    def find_run(self, units: int, start: int = 0) -> int:
        """Return the first place at or after `start`, else from zero, with `units` free units side by side; -1: none."""
        if units >= self._impossible_units or units > self.free_units:
            return -1
        found = next(self._runs(units, start), -1)
        if found < 0 and start:
            found = next(self._runs(units, 0), -1)
        if found < 0:
            self._impossible_units = units
        return found

    def _runs(self, units: int, start: int) -> Iterator[int]:
        """Yield places at or after `start` for a run, in order, at most one or a few in each free run."""
        if units == 1:
            yield from self.taken.search(0, start)
        elif units < _SHORT_RUN_UNITS:
            yield from self._short_runs(units, start)
        else:
            yield from self._long_runs(units, start)

    def _short_runs(self, units: int, start: int) -> Iterator[int]:
        # bit i of `free` says that a run of `width` units starts at i; doubling the width takes a shift and an AND
        free = ~self.taken[start:]
        width = 1
        while width < units:
            step = min(width, units - width)
            free &= free << step
            width += step
        for found in free.search(1):
            yield found + start

    def _long_runs(self, units: int, start: int) -> Iterator[int]:
        # a run of this many bits covers at least so many whole bytes, and looking for bytes is much faster
        taken = self.taken
        map_bytes = taken.tobytes()
        needle = bytes((units - 7) // 8)
        place = map_bytes.find(needle, start // 8)
        while place >= 0:
            first = max(taken.find(1, 0, place * 8, right=True) + 1, start)
            end = taken.find(1, place * 8)
            if end - first >= units:
                yield first
            place = map_bytes.find(needle, end // 8 + 1)

    def largest_run(self) -> int:
        """Return the length in units of the longest free run."""
        free = ~self.taken
        if not free.any():
            return 0
        # widths double until no run is that wide; then the bits of the answer are tried from the top
        stages = [free]
        while (wider := stages[-1] & (stages[-1] << (1 << (len(stages) - 1)))).any():
            stages.append(wider)
        width = 1 << (len(stages) - 1)
        best = stages[-1]
        for power in range(len(stages) - 2, -1, -1):
            wider = best & (stages[power] << width)
            if wider.any():
                best = wider
                width += 1 << power
        return width
