"""Size classes in the manner of memcached, over slabs that are carved from the pool
when they are needed.

The pool is cut into pages. A slab is a run of pages cut into slots of one size, and
serves the blocks of one size class; a slab whose slots are all free goes back to the
pool at once, so that pages follow the traffic when block sizes change. Blocks above
eight pages, or of a whole number of pages, take a run of pages of their own.

Each class has two bit arrays over the whole pool: where its slots start, and which of
those are free. A batch is one search in C, whatever the size of the blocks, and takes
the same time in a full pool as in an empty one.

What it costs: a slot may be up to an eighth larger than its block, a slab keeps its
pages while one slot is in use, and a free slot serves only its own class. (After
Bonwick, "The Slab Allocator", USENIX 1994, and memcached's slabs.c.)
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise
from typing import ClassVar

import attrs
from bitarray import bitarray
from bitarray.util import zeros

from infinistore.allocators.base import Allocator, AllocatorStatistics, Extent
from infinistore.allocators.runs import UnitMap

_PAGE_UNITS = 16
"""Units per page, in a pool that is large enough."""

_SMALLEST_POOL_PAGES = 64
"""Pages are smaller where the first arena would have fewer than this."""

_LARGEST_CLASS_PAGES = 8
"""Larger blocks have pages of their own: rounding costs them a ninth or less."""

_LARGEST_SLAB_PAGES = 16

_PAGES_MORE_FOR_NO_REST = 4

_CLASSES_PER_DOUBLING = 8


@attrs.define(eq=False)
class _SizeClass:
    """The slots of one size. Both arrays have a bit for each unit of the pool."""

    slot_units: int
    slab_pages: int
    slots: bitarray
    """1 where a slot starts."""
    free: bitarray
    """1 where a free slot starts."""
    lowest_free: int = 0
    """No free slot starts before this."""


@attrs.define(eq=False)
class _Slab:
    """A run of pages that is cut into slots."""

    begin: int
    """Its first unit."""
    end: int
    slots: int


class SlabAllocator(Allocator):
    """Slots in slabs. A footprint is the slot's size, or whole pages for large blocks.

    Room at the end of an arena that is shorter than a page is not used, and not counted
    in the capacity. What is left over at the end of a slab is counted as free.
    `largest_free_extent_bytes` is the longest run of free pages, or the largest free
    slot if that is longer: such a block can be placed and no larger one, but a smaller
    one may find that the only room is in slots of another class.
    """

    name: ClassVar[str] = "slab"

    def __init__(self, unit_bytes: int) -> None:
        super().__init__(unit_bytes)
        self._map = UnitMap()
        self._page_units = _PAGE_UNITS
        self._classes: dict[int, _SizeClass] = {}
        self._slabs: dict[int, _Slab] = {}
        """Every page of every slab."""
        self._spans: dict[int, int] = {}
        """First page and pages of every block that has pages of its own."""
        self._used_units = 0
        self._extents = 0

    def add_arena(self, index: int, length: int) -> None:
        """Add an arena of whole pages. The first arena settles how large a page is."""
        self.record_arena(index, length)
        units = length // self.unit_bytes
        if index == 0:
            while self._page_units > 1 and units < self._page_units * _SMALLEST_POOL_PAGES:
                self._page_units //= 2
        self._map.add_arena(units // self._page_units)
        total = len(self._map.taken) * self._page_units
        for size_class in self._classes.values():
            size_class.slots.extend(zeros(total - len(size_class.slots)))
            size_class.free.extend(zeros(total - len(size_class.free)))

    def footprint(self, size: int) -> int:
        """Return the size of the slot, or pages, of a block of `size` bytes."""
        return self._slot_units(size) * self.unit_bytes

    def _slot_units(self, size: int) -> int:
        """Return the units of a block's slot; whole pages are a span of pages."""
        units = -(-size // self.unit_bytes)
        if units > self._page_units * _LARGEST_CLASS_PAGES:
            step = self._page_units
        elif units > _CLASSES_PER_DOUBLING:
            step = 1 << ((units - 1).bit_length() - _CLASSES_PER_DOUBLING.bit_length())
        else:
            step = 1
        return -(-units // step) * step

    def allocate(self, sizes: Sequence[int]) -> list[Extent] | None:
        """Place a batch side by side where that strands nothing, else anywhere."""
        if not sizes:
            return []
        size = sizes[0]
        if sizes.count(size) == len(sizes):
            if size <= 0:
                raise ValueError(f"a block must have at least one byte, got {size}")
            placed = self._place(self._slot_units(size), len(sizes))
            return None if placed is None else self._extents_at(placed, [size] * len(sizes))
        if min(sizes) <= 0:
            raise ValueError(f"a block must have at least one byte, got {min(sizes)}")
        slots = [self._slot_units(size) for size in sizes]
        starts = [0] * len(sizes)
        done: dict[int, list[int]] = {}
        for slot_units in sorted(set(slots), reverse=True):
            wanted = [index for index, value in enumerate(slots) if value == slot_units]
            placed = self._place(slot_units, len(wanted))
            if placed is None:
                self._release(done)
                return None
            done[slot_units] = placed
            for index, start in zip(wanted, placed, strict=True):
                starts[index] = start
        return self._extents_at(starts, sizes)

    def _place(self, slot_units: int, count: int) -> list[int] | None:
        """Take slots, or spans of pages; return their first units, or None."""
        if slot_units % self._page_units:
            starts = self._place_in_slots(self._class_of(slot_units), count)
        else:
            starts = self._place_in_pages(slot_units // self._page_units, count)
        if starts is not None:
            self._used_units += slot_units * count
            self._extents += count
        return starts

    def _place_in_pages(self, pages: int, count: int) -> list[int] | None:
        found = self._map.best_fits(pages, count)
        if found is None:
            return None
        for first in found:
            self._map.take_run(first, pages)
            self._spans[first] = pages
        return [first * self._page_units for first in found]

    def _place_in_slots(self, size_class: _SizeClass, count: int) -> list[int] | None:
        free = size_class.free
        starts = list(islice(free.search(1, size_class.lowest_free), count))
        if len(starts) < count:
            if not self._carve(size_class, count - len(starts)):
                return None
            starts = list(islice(free.search(1, min([size_class.lowest_free, *starts])), count))
        elif (
            starts[-1] - starts[0] != (count - 1) * size_class.slot_units and 2 * self._map.free_units > self._map.units
        ):
            # a batch in one piece is worth new pages as long as half of them are free
            starts = self._fresh_slots(size_class, count) or starts
        else:
            size_class.lowest_free = starts[0]
        free[starts] = 0
        return starts

    def _fresh_slots(self, size_class: _SizeClass, count: int) -> list[int] | None:
        per_slab = size_class.slab_pages * self._page_units // size_class.slot_units
        pages = -(-count // per_slab) * size_class.slab_pages
        first = next((first for first, _ in self._map.holes(pages)), None)
        if first is None:
            return None
        for page in range(first, first + pages, size_class.slab_pages):
            self._make_slab(size_class, page, size_class.slab_pages)
        return list(islice(size_class.free.search(1, first * self._page_units), count))

    def _class_of(self, slot_units: int) -> _SizeClass:
        size_class = self._classes.get(slot_units)
        if size_class is None:
            total = len(self._map.taken) * self._page_units
            size_class = _SizeClass(slot_units, self._pages_per_slab(slot_units), zeros(total), zeros(total))
            self._classes[slot_units] = size_class
        return size_class

    def _pages_per_slab(self, slot_units: int) -> int:
        """Return the fewest pages that leave nothing, or at most a 16th, unused."""
        fewest = -(-slot_units // self._page_units)
        for pages in range(fewest, fewest + _PAGES_MORE_FOR_NO_REST):
            if pages * self._page_units % slot_units == 0:
                return pages
        for pages in range(fewest, _LARGEST_SLAB_PAGES + 1):
            slab_units = pages * self._page_units
            if slab_units % slot_units * 16 <= slab_units:
                return pages
        return fewest

    def _carve(self, size_class: _SizeClass, slots: int) -> bool:
        """Make slabs for at least so many slots; False if there is no room."""
        fewest = -(-size_class.slot_units // self._page_units)
        for pages in sorted({size_class.slab_pages, fewest}, reverse=True):
            per_slab = pages * self._page_units // size_class.slot_units
            found = self._map.best_fits(pages, -(-slots // per_slab))
            if found is not None:
                for first in found:
                    self._make_slab(size_class, first, pages)
                return True
        return False

    def _make_slab(self, size_class: _SizeClass, first_page: int, pages: int) -> None:
        slot_units = size_class.slot_units
        begin = first_page * self._page_units
        end = begin + pages * self._page_units
        slab = _Slab(begin, end, (end - begin) // slot_units)
        self._map.take_run(first_page, pages)
        for page in range(first_page, first_page + pages):
            self._slabs[page] = slab
        places = slice(begin, begin + slab.slots * slot_units, slot_units)
        size_class.slots[places] = 1
        size_class.free[places] = 1
        size_class.lowest_free = min(size_class.lowest_free, begin)

    def _extents_at(self, starts: list[int], sizes: Sequence[int]) -> list[Extent]:
        unit_bytes = self.unit_bytes
        page_units = self._page_units
        bases = [first * page_units for first in self._map.firsts]
        if len(bases) == 1:
            return [(0, start * unit_bytes, size) for start, size in zip(starts, sizes, strict=True)]
        arenas = [self._map.arena_of(start // page_units) for start in starts]
        return [
            (arena, (start - bases[arena]) * unit_bytes, size)
            for arena, start, size in zip(arenas, starts, sizes, strict=True)
        ]

    def adopt(self, extents: Sequence[Extent]) -> list[bool]:
        """Take those extents that are slots of slabs, or pages, and are free."""
        return list(map(self._adopt, extents))

    def _adopt(self, extent: Extent) -> bool:
        arena, offset, length = extent
        page_units = self._page_units
        if not 0 <= arena < len(self._map.firsts) or offset < 0 or offset % self.unit_bytes or length <= 0:
            return False
        start = self._map.firsts[arena] * page_units + offset // self.unit_bytes
        slot_units = self._slot_units(length)
        if slot_units % page_units == 0:
            first, rest = divmod(start, page_units)
            adopted = not rest and self._adopt_pages(arena, first, slot_units // page_units)
        else:
            adopted = self._adopt_slot(arena, start, self._class_of(slot_units))
        if adopted:
            self._used_units += slot_units
            self._extents += 1
        return adopted

    def _adopt_pages(self, arena: int, first: int, pages: int) -> bool:
        if not self._are_free(arena, first, pages):
            return False
        self._map.take_run(first, pages)
        self._spans[first] = pages
        return True

    def _adopt_slot(self, arena: int, start: int, size_class: _SizeClass) -> bool:
        """Take a slot, of a slab that is made or made longer for it. A slab is so short
        that slots begin at a page only once: so any slot tells where it begins."""
        page_units, slot_units = self._page_units, size_class.slot_units
        page = start // page_units
        before = range(page, max(self._map.firsts[arena], page - size_class.slab_pages + 1) - 1, -1)
        first = next((one for one in before if (start - one * page_units) % slot_units == 0), None)
        if first is None:
            return False
        slots = (start - first * page_units) // slot_units + 1
        fewest = -(-slot_units // page_units)
        pages = fewest if slots * slot_units <= fewest * page_units else size_class.slab_pages
        if slots * slot_units > pages * page_units:
            return False
        slab = self._slabs.get(first)
        if slab is None:
            if not self._are_free(arena, first, pages):
                return False
            self._make_slab(size_class, first, pages)
        elif not size_class.slots[first * page_units]:  # of another class, or not its first page
            return False
        longer = slab is None or slab.slots >= slots or self._lengthen(arena, size_class, slab, pages)
        if not longer or not size_class.free[start]:
            return False
        size_class.free[start] = 0
        return True

    def _lengthen(self, arena: int, size_class: _SizeClass, slab: _Slab, pages: int) -> bool:
        page_units, slot_units = self._page_units, size_class.slot_units
        end = slab.begin // page_units + pages
        more = range(slab.end // page_units, end)
        if not self._are_free(arena, more.start, len(more)):
            return False
        self._map.take_run(more.start, len(more))
        for page in more:
            self._slabs[page] = slab
        slots = pages * page_units // slot_units
        places = slice(slab.begin + slab.slots * slot_units, slab.begin + slots * slot_units, slot_units)
        size_class.slots[places] = size_class.free[places] = 1
        slab.end, slab.slots = end * page_units, slots
        size_class.lowest_free = min(size_class.lowest_free, slab.begin)
        return True

    def _are_free(self, arena: int, first: int, pages: int) -> bool:
        return first + pages <= self._map.ends[arena] and self._map.taken.find(1, first, first + pages) < 0

    def free(self, extents: Iterable[Extent]) -> None:
        """Give back extents; all are checked before the first is freed."""
        by_slot: dict[int, list[int]] = {}
        for (arena, length), offsets in _grouped(extents):
            if not (0 <= arena < len(self._map.firsts) and length > 0 and min(offsets) >= 0):
                raise self._not_allocated(arena, offsets, length)
            base = self._map.firsts[arena] * self._page_units
            starts = [base + offset // self.unit_bytes for offset in offsets]
            aligned = sum(offsets) == (sum(starts) - base * len(starts)) * self.unit_bytes
            if not aligned or max(starts) >= self._map.ends[arena] * self._page_units:
                raise self._not_allocated(arena, offsets, length)
            slot_units = self._slot_units(length)
            if not self._all_allocated(slot_units, starts):
                raise self._not_allocated(arena, offsets, length)
            by_slot.setdefault(slot_units, []).extend(starts)
        for starts in by_slot.values():
            if len(set(starts)) != len(starts):
                raise ValueError("an extent is freed twice in one call")
        self._release(by_slot)

    def _not_allocated(self, arena: int, offsets: list[int], length: int) -> ValueError:
        places = str(offsets[0]) if len(offsets) == 1 else f"one of {offsets}"
        return ValueError(
            f"there is no allocated extent of {length} bytes in arena {arena} at {places}: it was freed before, "
            f"or never given out"
        )

    def _all_allocated(self, slot_units: int, starts: list[int]) -> bool:
        page_units = self._page_units
        if slot_units % page_units == 0:
            pages = slot_units // page_units
            return all(start % page_units == 0 and self._spans.get(start // page_units) == pages for start in starts)
        size_class = self._classes.get(slot_units)
        return size_class is not None and size_class.slots[starts].all() and not size_class.free[starts].any()

    def _release(self, by_slot: dict[int, list[int]]) -> None:
        """Free allocated places: their first units, by the units of their slots."""
        for slot_units, starts in by_slot.items():
            if slot_units % self._page_units:
                self._release_slots(self._classes[slot_units], starts)
            else:
                for start in starts:
                    first = start // self._page_units
                    self._map.give_back_run(first, self._spans.pop(first))
            self._used_units -= slot_units * len(starts)
            self._extents -= len(starts)

    def _release_slots(self, size_class: _SizeClass, starts: list[int]) -> None:
        page_units = self._page_units
        free = size_class.free
        free[starts] = 1
        size_class.lowest_free = min(size_class.lowest_free, *starts)
        slabs = self._slabs
        free_slots = free.count
        for slab in {slabs[start // page_units] for start in starts}:
            if free_slots(1, slab.begin, slab.end) == slab.slots:
                free[slab.begin : slab.end] = 0
                size_class.slots[slab.begin : slab.end] = 0
                pages = range(slab.begin // page_units, slab.end // page_units)
                self._map.give_back_run(pages.start, len(pages))
                for page in pages:
                    del slabs[page]

    def statistics(self) -> AllocatorStatistics:
        """Return what is held now."""
        largest = self._map.largest_hole() * self._page_units
        largest = max(largest, *(c.slot_units for c in self._classes.values() if c.free.any()), 0)
        return AllocatorStatistics(
            name=self.name,
            unit_bytes=self.unit_bytes,
            arenas=len(self._map.firsts),
            capacity_bytes=self._map.units * self._page_units * self.unit_bytes,
            used_bytes=self._used_units * self.unit_bytes,
            extents=self._extents,
            largest_free_extent_bytes=largest * self.unit_bytes,
        )

    def occupied_bytes(self, index: int, parts: int) -> list[int]:
        """Return how many bytes are taken in each of so many equal parts of an arena.

        A block counts where it begins. Takes some 0.1 us for each block that has pages
        of its own.
        """
        first, end = (page * self._page_units for page in (self._map.firsts[index], self._map.ends[index]))
        bounds = [first + (end - first) * part // parts for part in range(parts + 1)]
        taken = [0] * parts
        for size_class in self._classes.values():
            for part, (begin, stop) in enumerate(pairwise(bounds)):
                slots = size_class.slots.count(1, begin, stop) - size_class.free.count(1, begin, stop)
                taken[part] += slots * size_class.slot_units
        for page, pages in self._spans.items():
            start = page * self._page_units
            if first <= start < end:
                taken[bisect_right(bounds, start) - 1] += pages * self._page_units
        return [units * self.unit_bytes for units in taken]


def _grouped(extents: Iterable[Extent]) -> Iterator[tuple[tuple[int, int], list[int]]]:
    """Yield the offsets of the extents by arena and length."""
    extents = list(extents)
    if not extents:
        return
    arenas, offsets, lengths = zip(*extents, strict=True)
    if arenas.count(arenas[0]) == len(arenas) and lengths.count(lengths[0]) == len(lengths):
        yield (arenas[0], lengths[0]), list(offsets)
        return
    groups: dict[tuple[int, int], list[int]] = {}
    for arena, offset, length in extents:
        groups.setdefault((arena, length), []).append(offset)
    yield from groups.items()
