"""A map of equal units, taken or free, over several arenas, and the search for free
runs ("holes") in it.

The bitmap strategy keeps one map of units, the slab strategy one map of pages. All
arenas lie in one bit array, with a taken bit after each, so that one search in C covers
all and no hole spans two arenas. The map promises that it finds a hole if there is one,
and that a search that fails costs tens of microseconds for a map of some hundred
thousand units, and a few when it failed before and little was freed since. Which hole
to use is the strategies' affair.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise

from bitarray import bitarray
from bitarray.util import zeros

_SHORT_HOLE_UNITS = 64
"""Shorter holes are found by shifting the map against itself, others by zero bytes."""

WINDOW_UNITS = 1 << 16
"""How much of the map is shifted at a time, so that a search that succeeds early does
not pay for the rest; and how much is searched for a hole that would only be better."""

_REMEMBERED_PLACES = 64
"""With more changes than these since a failed search, the whole map is searched."""

_HOLES_COMPARED = 64
"""How many holes that are long enough are compared for the best fit."""


class UnitMap:
    """Which units are taken. A unit's index counts the separators, too."""

    def __init__(self) -> None:
        self.taken = bitarray()
        """One bit per unit: 1 is taken, or a separator."""
        self.firsts: list[int] = []
        """The first unit of each arena."""
        self.ends: list[int] = []
        """The separator after the last unit of each arena."""
        self.units = 0
        """How many units there are, without separators."""
        self.free_units = 0
        """How many of them are free."""
        # A search for `_failed_units` found nothing. Every hole that has become that
        # long since then holds one of `_places`, fewer than `_failed_units` units from
        # its start: where units were freed, or what follows units that were taken.
        self._failed_units: int | None = None
        self._places: list[int] = []

    def add_arena(self, units: int) -> None:
        """Append an arena of `units` free units."""
        self.firsts.append(len(self.taken))
        self.taken.extend(zeros(units))
        self.ends.append(len(self.taken))
        self.taken.append(1)
        self.units += units
        self.free_units += units
        self._failed_units = None

    def arena_of(self, unit: int) -> int:
        """Return the arena that `unit` lies in."""
        return bisect_right(self.firsts, unit) - 1

    def take_run(self, first: int, units: int) -> None:
        """Mark a run of free units as taken."""
        self.taken[first : first + units] = 1
        self.free_units -= units
        self._remember((first + units,))  # what is left before the run has its place already

    def take_each(self, units: list[int]) -> None:
        """Mark these free units as taken."""
        self.taken[units] = 1
        self.free_units -= len(units)
        if self._failed_units is not None:
            self._remember([unit + 1 for unit in units])

    def give_back_run(self, first: int, units: int) -> None:
        """Mark a run of taken units as free."""
        self.taken[first : first + units] = 0
        self.free_units += units
        self._remember((first,))

    def give_back_each(self, units: list[int]) -> None:
        """Mark these taken units as free."""
        self.taken[units] = 0
        self.free_units += len(units)
        self._remember(units)

    def _remember(self, places: Iterable[int]) -> None:
        if self._failed_units is not None:
            self._places.extend(places)
            if len(self._places) > _REMEMBERED_PLACES:
                self._failed_units = None

    def holes(self, units: int, start: int = 0) -> Iterator[tuple[int, int]]:
        """Yield the holes of at least `units` units as (first unit, end), each once.

        They come in order, from the hole that `start` lies in, or that ends there, and
        then from zero, unless few can be that long: these come in any order. Nothing
        may be taken or given back while the iterator is in use.
        """
        if units > self.free_units:
            return iter(())
        if self._failed_units is not None and units >= self._failed_units:
            return iter(self._holes_at_places(units))
        if start:
            start = self.taken.find(1, 0, start, right=True) + 1  # so that no hole is cut in two
        return self._remembering_failure(units, chain(self._search(units, start), self._search(units, 0, start)))

    def taken_in(self, arena: int, parts: int) -> list[int]:
        """Return the units taken in each of `parts` nearly equal parts of an arena."""
        first, units = self.firsts[arena], self.ends[arena] - self.firsts[arena]
        bounds = [first + units * part // parts for part in range(parts + 1)]
        return [self.taken.count(1, begin, end) for begin, end in pairwise(bounds)]

    def hole_near(self, units: int, start: int) -> tuple[int | None, int]:
        """Look for a hole of at least `units` units in a part of the map of bounded
        length from `start` on.

        Returns its first unit, or None, and where to go on looking; a hole elsewhere is
        not found.
        """
        start = self.taken.find(1, 0, start, right=True) + 1
        stop = self.taken.find(1, min(start + max(WINDOW_UNITS, units), len(self.taken) - 1)) + 1
        first = self.taken.find(0, start, stop)
        if first >= 0 and self.taken.find(1, first, first + units) < 0:  # most often, the first hole will do
            return first, stop % len(self.taken)
        found, _ = next(self._search(units, start, stop), (None, 0))
        return found, stop % len(self.taken)

    def _remembering_failure(self, units: int, found: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        first = next(found, None)
        if first is None:
            self._failed_units = units
            self._places = []
            return
        yield first
        yield from found

    def _holes_at_places(self, units: int) -> list[tuple[int, int]]:
        taken = self.taken
        holes = {}
        for place in self._places:
            if not taken[place]:
                first = taken.find(1, 0, place, right=True) + 1
                if first not in holes:
                    holes[first] = taken.find(1, place)
        return [(first, end) for first, end in holes.items() if end - first >= units]

    def _search(self, units: int, start: int, stop: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield the holes in [start, stop), each whole at its beginning."""
        end = len(self.taken) if stop is None else stop
        if units < _SHORT_HOLE_UNITS:
            return self._search_by_shifting(units, start, end)
        return self._search_by_bytes(units, start, end)

    def _search_by_shifting(self, units: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
        taken = self.taken
        while start < stop:
            # bit i of `fits` says that `width` free units start at i; a shift and an
            # AND double the width
            fits = ~taken[start : min(start + WINDOW_UNITS + units - 1, stop)]
            width = 1
            while width < units:
                step = min(width, units - width)
                fits &= fits << step
                width += step
            place = fits.find(1)
            end = 0
            while place >= 0:
                first = start + place
                end = taken.find(1, first)
                yield first, end
                place = fits.find(1, min(end - start, len(fits)))
            start = max(start + WINDOW_UNITS, end)

    def _search_by_bytes(self, units: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
        # a hole this long covers at least so many whole bytes, and a search for bytes
        # is many times faster
        taken = self.taken
        base = start // 8  # the slice starts at a whole byte
        map_bytes = taken[base * 8 : stop].tobytes()
        needle = bytes((units - 7) // 8)
        place = map_bytes.find(needle)
        while place >= 0:
            inside = (base + place) * 8
            first = taken.find(1, 0, inside, right=True) + 1
            end = taken.find(1, inside)
            if end - first >= units:
                yield first, end
            place = map_bytes.find(needle, end // 8 + 1 - base)

    def has_room(self, units: int, count: int) -> bool:
        """Say whether `count` runs of `units` units can be placed."""
        for first, end in self.holes(units):
            count -= (end - first) // units
            if count <= 0:
                return True
        return False

    def best_fits(self, units: int, count: int, start: int = 0) -> list[int] | None:
        """Return places for `count` runs of `units` units, or None when there is no
        room for all of them.

        The shortest holes that are long enough are filled first. When there are many,
        those after `start` are compared, and no further than `WINDOW_UNITS` if that is
        not 0: else each block of a pool that fills up would search all of it.
        """
        holes = []
        room = 0
        for first, end in self.holes(units, start):
            holes.append((end - first, first, end))
            room += (end - first) // units
            if room >= count and (len(holes) >= _HOLES_COMPARED or (start and end - start >= WINDOW_UNITS)):
                break
        if room < count:
            return None
        places: list[int] = []
        for _, first, end in sorted(holes):
            places += range(first, end - units + 1, units)[: count - len(places)]
            if len(places) >= count:
                break
        return places

    def largest_hole(self) -> int:
        """Return the length in units of the longest hole, exactly."""
        fits = [~self.taken]
        if not fits[0].any():
            return 0
        # double the width until no hole is that wide, then try the bits of the answer
        # from the top
        while (wider := fits[-1] & (fits[-1] << (1 << (len(fits) - 1)))).any():
            fits.append(wider)
        best = fits[-1]
        width = 1 << (len(fits) - 1)
        for power in range(len(fits) - 2, -1, -1):
            wider = best & (fits[power] << width)
            if wider.any():
                best = wider
                width += 1 << power
        return width
