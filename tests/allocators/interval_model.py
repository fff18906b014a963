"""What any allocator must agree with: a plain list of intervals in every arena."""

from bisect import bisect_right, insort

from infinistore.allocators import Allocator, Extent


class IntervalModel:
    """The extents that are allocated, as (start, end) of their footprints, sorted, one list for each arena."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._lengths: list[int] = []
        self._intervals: list[list[tuple[int, int]]] = []
        self.extents: list[Extent] = []

    def add_arena(self, length: int) -> None:
        self._lengths.append(length)
        self._intervals.append([])

    def _interval(self, extent: Extent) -> tuple[int, int]:
        _, offset, length = extent
        return offset, offset + self._allocator.footprint(length)

    def add(self, extent: Extent) -> None:
        """Take an extent in, if it is one that may be given out now."""
        arena, offset, _ = extent
        start, end = self._interval(extent)
        assert offset >= 0
        assert offset % self._allocator.unit_bytes == 0
        assert end <= self._lengths[arena]
        intervals = self._intervals[arena]
        place = bisect_right(intervals, (start, end))
        assert place == 0 or intervals[place - 1][1] <= start
        assert place == len(intervals) or end <= intervals[place][0]
        insort(intervals, (start, end))
        self.extents.append(extent)

    def remove(self, extent: Extent) -> None:
        self._intervals[extent[0]].remove(self._interval(extent))
        self.extents.remove(extent)

    @property
    def used_bytes(self) -> int:
        return sum(self.used_bytes_by_arena)

    @property
    def used_bytes_by_arena(self) -> list[int]:
        return [sum(end - start for start, end in intervals) for intervals in self._intervals]

    @property
    def largest_gap_bytes(self) -> int:
        """The longest free run of whole units."""
        unit_bytes = self._allocator.unit_bytes
        largest = 0
        for length, intervals in zip(self._lengths, self._intervals, strict=True):
            end = 0
            for start, next_end in [*intervals, (length // unit_bytes * unit_bytes, 0)]:
                largest = max(largest, start - end)
                end = next_end
        return largest

    def capacity_bytes(self, page_units: int = 1) -> int:
        page_bytes = page_units * self._allocator.unit_bytes
        return sum(length // page_bytes * page_bytes for length in self._lengths)

    @property
    def first_arena_units(self) -> int:
        return self._lengths[0] // self._allocator.unit_bytes if self._lengths else 0
