"""What any allocator must agree with: a plain list of intervals in every arena."""

from bisect import bisect_right, insort
from typing import Any

from infinistore.allocators.base import Allocator, Extent


class ContractViolation(AssertionError):
    """An allocator breaks the contract; the message names the rule."""


def require(condition: bool, rule: str, found: Any = None) -> None:
    """Raise ContractViolation unless `condition` holds."""
    if not condition:
        raise ContractViolation(rule if found is None else f"{rule}; found {found!r:.300}")


class IntervalModel:
    """The extents that are allocated, as sorted (start, end), a list for each arena."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._lengths: list[int] = []
        self._intervals: list[list[tuple[int, int]]] = []
        self.extents: list[Extent] = []

    def add_arena(self, length: int) -> None:
        """Add the next arena, of `length` bytes."""
        self._lengths.append(length)
        self._intervals.append([])

    def _interval(self, extent: Extent) -> tuple[int, int]:
        _, offset, length = extent
        return offset, offset + self._allocator.footprint(length)

    def add(self, extent: Extent) -> None:
        """Take an extent in, if it may be given out now; ContractViolation if not."""
        arena, offset, _ = extent
        require(0 <= arena < len(self._lengths), "an extent lies in an arena that was added", extent)
        start, end = self._interval(extent)
        unit_bytes = self._allocator.unit_bytes
        require(offset >= 0 and offset % unit_bytes == 0, "an extent starts at a multiple of the unit", extent)
        require(end <= self._lengths[arena], "an extent ends within its arena", extent)
        intervals = self._intervals[arena]
        place = bisect_right(intervals, (start, end))
        clear = (place == 0 or intervals[place - 1][1] <= start) and (
            place == len(intervals) or end <= intervals[place][0]
        )
        require(clear, "an extent overlaps no other", extent)
        insort(intervals, (start, end))
        self.extents.append(extent)

    def remove(self, extent: Extent) -> None:
        """Take an extent out that is there."""
        self._intervals[extent[0]].remove(self._interval(extent))
        self.extents.remove(extent)

    @property
    def used_bytes(self) -> int:
        """The sum of the footprints."""
        return sum(self.used_bytes_by_arena)

    @property
    def used_bytes_by_arena(self) -> list[int]:
        """The same, by arena."""
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
