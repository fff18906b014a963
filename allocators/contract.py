"""The contract of `Allocator` as a test suite, for any strategy.

With pytest, in a test file of the package that brings the strategy:

    from infinistore.allocators.contract import AllocatorContract
    from some_package import BuddyAllocator

    class TestBuddy(AllocatorContract):
        allocator = BuddyAllocator

Without pytest, `broken_rules(TestBuddy)` returns what failed.

The suite compares the strategy with a plain model, call by call, in random sequences
that Hypothesis makes. So this module needs Hypothesis (`pip install hypothesis`).
In InfiniStore only the suite for movers imports this module.
"""

import random
import re
import sys
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from infinistore.allocators.base import Allocator, Extent
from infinistore.errors import ConfigError

__all__ = ["AllocatorContract", "ContractViolation", "broken_rules"]

UNIT = 64

_LENGTHS = st.one_of(
    st.integers(0, 40 * UNIT),
    st.integers(100 * UNIT, 300 * UNIT),
    st.integers(1100 * UNIT, 1500 * UNIT),  # large enough for strategies that divide an arena into pages
)
_SIZES = st.one_of(
    st.sampled_from([1, UNIT, UNIT + 1, 3 * UNIT, 7 * UNIT, 16 * UNIT]),
    st.integers(1, 40 * UNIT),
    st.integers(1, 400 * UNIT),
)


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


class AllocatorContract:
    """The tests that every strategy passes. Name the strategy in a subclass:
    `allocator`.

    The other class attributes say what the contract leaves to a strategy. Set them only
    where yours differs.
    """

    allocator: ClassVar[type[Allocator]]
    """The strategy."""

    any_smaller_block_fits: ClassVar[bool] = True
    """Every block of at most `largest_free_extent_bytes` is placed. Not so if a free
    slot serves only its own size class; a block of exactly that size is placed all the
    same."""

    uses_any_free_run: ClassVar[bool] = False
    """A batch that fits into one run of free units is never refused."""

    batches_in_one_piece: ClassVar[bool] = True
    """In an empty pool, a batch lies in one piece: a preference, not a rule."""

    least_fill: ClassVar[float] = 0.93
    """Which part of a pool of 4,096 units can be filled with blocks of one size, of up
    to 64 units. A strategy that wastes more passes with a lower number, but stores
    less."""

    refused_arena: ClassVar[str] = ""
    """Matches the message of the `ValueError` for an arena that is out of turn."""
    refused_free: ClassVar[str] = ""
    """The same for an extent that is not allocated."""
    refused_size: ClassVar[str] = ""
    """The same for a size of zero or less."""

    settings: ClassVar[hypothesis.settings | None] = None
    """How much Hypothesis tries; None: as its profile says."""

    def capacity_bytes(self, arena_bytes: Sequence[int]) -> int:
        """Return what blocks can take at most of arenas of these lengths: all whole
        units.

        Override it for a strategy that uses arenas in larger pieces.
        """
        return sum(length // UNIT * UNIT for length in arena_bytes)

    def new_allocator(self, *arena_bytes: int) -> Allocator:
        """Return a new allocator with units of 64 bytes and arenas of these lengths."""
        allocator = self.allocator(UNIT)
        for index, length in enumerate(arena_bytes):
            allocator.add_arena(index, length)
        return allocator

    def test_it_has_a_name_and_says_it(self) -> None:
        """The name in `--allocator` is the one in the statistics."""
        name = self.allocator.name
        require(isinstance(name, str) and name != "", "a strategy has a name", repr(name))
        require(self.new_allocator().statistics().name == name, "statistics have the strategy's name")

    def test_calls_in_any_order_agree_with_a_model(self) -> None:
        """Everything else that the contract says, in random sequences of calls."""

        class Machine(_AllocatorMachine):
            contract = self

        run_state_machine_as_test(Machine, settings=self.settings)

    def test_nothing_can_be_placed_before_the_first_arena(self) -> None:
        """Only the empty batch is."""
        allocator = self.new_allocator()
        require(allocator.allocate([1]) is None, "before the first arena every batch is refused")
        require(allocator.allocate([]) == [], "an empty batch has no extents")
        require(allocator.statistics().largest_free_extent_bytes == 0, "without an arena nothing can be placed")

    def test_an_arena_shorter_than_a_unit_holds_nothing(self) -> None:
        """The next arena still holds blocks."""
        allocator = self.new_allocator(UNIT - 1)
        require(allocator.allocate([1]) is None, "an arena shorter than a unit holds nothing")
        allocator.add_arena(1, 10 * UNIT)
        extents = allocator.allocate([1])
        require(extents is not None and extents[0][0] == 1, "a block is placed in the arena that has space", extents)

    def test_arenas_come_in_turn_and_are_not_of_negative_length(self) -> None:
        """`ValueError` for any other."""
        allocator = self.new_allocator()
        for index, length in [(1, UNIT), (-1, UNIT), (0, -1)]:
            with _refused(ValueError, self.refused_arena, f"arena {index} of {length} bytes, of 0 arenas, is refused"):
                allocator.add_arena(index, length)
        allocator.add_arena(0, UNIT)
        for index in (0, 2):
            with _refused(ValueError, self.refused_arena, f"arena {index}, of 1 arena, is refused"):
                allocator.add_arena(index, UNIT)
        require(allocator.statistics().arenas == 1, "an arena that is refused is not added")

    def test_a_unit_is_a_multiple_of_a_cache_line(self) -> None:
        """`ConfigError` for any other."""
        for unit_bytes in (-64, 0, 1, 63, 100):
            with _refused(ConfigError, "multiple of 64", f"a unit of {unit_bytes} bytes is refused"):
                self.allocator(unit_bytes)

    def test_a_footprint_is_whole_units_and_holds_the_block(self) -> None:
        """Whatever the size."""
        allocator = self.new_allocator(4096 * UNIT)
        for size in [*range(1, 4 * UNIT), *range(4 * UNIT, 400 * UNIT, 37)]:
            footprint = allocator.footprint(size)
            require(footprint % UNIT == 0, "a footprint is a multiple of the unit", (size, footprint))
            require(footprint >= size, "a footprint holds its block", (size, footprint))

    def test_a_batch_in_an_empty_pool_lies_in_one_piece(self) -> None:
        """Each block starts where the footprint of the one before ends."""
        if not self.batches_in_one_piece:
            return
        for size in (UNIT, UNIT - 5, 3 * UNIT, 8 * UNIT):
            allocator = self.new_allocator(4096 * UNIT)
            extents = allocator.allocate([size] * 16)
            require(extents is not None, "a batch that fits into an empty pool is placed", size)
            assert extents is not None
            first, footprint = extents[0][1], allocator.footprint(size)
            side_by_side = [(0, first + index * footprint, size) for index in range(16)]
            require(extents == side_by_side, "a batch in an empty pool lies in one piece", extents)

    def test_sizes_may_be_any_sequence_and_extents_any_iterable(self) -> None:
        """A tuple of sizes; an iterator over extents; none at all."""
        allocator = self.new_allocator(100 * UNIT)
        extents = allocator.allocate((1, 2, UNIT * 2))
        require(extents is not None, "sizes may be a tuple")
        assert extents is not None
        allocator.free(iter(extents))
        allocator.free([])
        require(allocator.statistics().used_bytes == 0, "extents may be an iterator")

    def test_a_pool_can_be_filled_emptied_and_filled_with_another_size(self) -> None:
        """A change of block size strands nothing."""
        allocator = self.new_allocator(4096 * UNIT)
        for units in (1, 4, 2, 16, 3, 64, 1):
            extents: list[Extent] = []
            while (placed := allocator.allocate([units * UNIT])) is not None:
                extents += placed
            found = allocator.statistics()
            filled = found.used_bytes / (4096 * UNIT)
            require(filled >= self.least_fill, "a pool can be filled with blocks of one size", (units, filled))
            largest = found.largest_free_extent_bytes
            require(largest < units * UNIT, "a full pool has no larger free extent than it places", (units, largest))
            random.Random(units).shuffle(extents)
            allocator.free(extents)
        require(allocator.statistics().used_bytes == 0, "when everything is freed, nothing is used")


def broken_rules(contract: type[AllocatorContract]) -> dict[str, str]:
    """Run the suite without pytest; return the tests that failed, and how."""
    found: dict[str, str] = {}
    for name in dir(contract):
        if name.startswith("test_"):
            try:
                getattr(contract(), name)()
            except Exception as error:  # noqa: BLE001 - whatever a strategy raises
                found[name] = f"{type(error).__name__}: {error}"
    return found


@contextmanager
def _refused(kind: type[Exception], message: str, what: str) -> Iterator[None]:
    """Require an error of this kind, with a match of `message` in its message."""
    try:
        yield
    except kind as error:
        require(re.search(message, str(error)) is not None, f"{what} with a message that says so", str(error))
        return
    require(False, f"{what} ({kind.__name__})")


class _AllocatorMachine(RuleBasedStateMachine):
    """Calls in any order, each compared with what a list of intervals says."""

    contract: ClassVar[AllocatorContract]

    def __init__(self) -> None:
        super().__init__()
        self.allocator = self.contract.new_allocator()
        self.model = IntervalModel(self.allocator)
        self.arena_bytes: list[int] = []

    @initialize(length=_LENGTHS)
    def add_first_arena(self, length: int) -> None:
        self.add_arena(length)

    @precondition(lambda self: len(self.arena_bytes) < 4)
    @rule(length=_LENGTHS)
    def add_arena(self, length: int) -> None:
        arenas = len(self.arena_bytes)
        with _refused(ValueError, self.contract.refused_arena, "an arena that is out of turn is refused"):
            self.allocator.add_arena(arenas + 1, length)
        self.allocator.add_arena(arenas, length)
        self.model.add_arena(length)
        self.arena_bytes.append(length)

    @rule(sizes=st.lists(_SIZES, max_size=12))
    def allocate_a_mixed_batch(self, sizes: list[int]) -> None:
        self.allocate(sizes)

    @rule(size=_SIZES, count=st.integers(1, 70))
    def allocate_equal_blocks(self, size: int, count: int) -> None:
        self.allocate([size] * count)

    @rule()
    def fill_what_is_left(self) -> None:
        before = self.allocator.statistics()
        self.allocate([UNIT] * (before.free_bytes // UNIT))

    def allocate(self, sizes: list[int]) -> None:
        before = self.allocator.statistics()
        extents = self.allocator.allocate(sizes)
        if extents is None:
            require(self.allocator.statistics() == before, "a batch that is refused changes nothing", sizes)
            largest = before.largest_free_extent_bytes
            if len(sizes) == 1 and self.contract.any_smaller_block_fits:
                require(sizes[0] > largest, "a block that fits is placed", (sizes, largest))
            if self.contract.uses_any_free_run:
                together = sum(map(self.allocator.footprint, sizes))
                require(together > self.model.largest_gap_bytes, "a batch that fits into one free run is placed", sizes)
            return
        lengths = [length for _, _, length in extents]
        require(lengths == sizes, "a batch has one extent for each size, in order", (sizes, extents))
        require(all(type(extent) is tuple for extent in extents), "an extent is an exact tuple", extents)
        for extent in extents:
            self.model.add(extent)

    @precondition(lambda self: self.model.extents)
    @rule(seed=st.randoms(use_true_random=False), count=st.integers(1, 70))
    def free_some(self, seed: random.Random, count: int) -> None:
        chosen = seed.sample(self.model.extents, min(count, len(self.model.extents)))
        self.free(chosen)
        self.refuses_to_free([chosen[0]], "an extent that was freed before is refused")

    @precondition(lambda self: self.model.extents)
    @rule(seed=st.randoms(use_true_random=False))
    def free_everything_of_one_size(self, seed: random.Random) -> None:
        size = seed.choice(self.model.extents)[2]
        self.free([extent for extent in self.model.extents if extent[2] == size])

    def free(self, extents: list[Extent]) -> None:
        self.allocator.free(extents)
        for extent in extents:
            self.model.remove(extent)

    @precondition(lambda self: self.model.extents)
    @rule(seed=st.randoms(use_true_random=False))
    def refuse_foreign_extents(self, seed: random.Random) -> None:
        extents = self.model.extents
        valid = seed.sample(extents, min(3, len(extents)))
        arena, offset, length = seed.choice(extents)
        self.refuses_to_free([*valid, valid[0]], "an extent that is freed twice in one call is refused")
        never = "an extent that was never given out is refused"
        for foreign in (
            (arena, offset + 1, length),
            (arena, -UNIT, length),
            (arena, offset, 0),
            (arena, offset, -length),
            (arena, offset, 100_000 * UNIT),
            (arena, 100_000 * UNIT + offset, length),
            (len(self.arena_bytes), offset, length),
            (-1, offset, length),
        ):
            self.refuses_to_free([*valid, foreign], never)
            self.refuses_to_free([foreign], never)
        footprint: Callable[[int], int] = self.allocator.footprint
        for shift in (-UNIT, UNIT):
            place = (arena, offset + shift)
            if not any(extent[:2] == place and footprint(extent[2]) == footprint(length) for extent in extents):
                self.refuses_to_free([(*place, length)], never)
            other = length + shift
            if other > 0 and footprint(other) != footprint(length):
                self.refuses_to_free([(arena, offset, other)], never)

    def refuses_to_free(self, extents: list[Extent], what: str) -> None:
        before = self.allocator.statistics()
        with _refused(ValueError, self.contract.refused_free, what):
            self.allocator.free(extents)
        require(self.allocator.statistics() == before, "a free that is refused changes nothing", extents)

    @rule(size=st.integers(-(1 << 40), 0))
    def refuse_a_size_of_nothing(self, size: int) -> None:
        for sizes in ([size], [1, size], [size, size]):
            with _refused(ValueError, self.contract.refused_size, "a size of zero or less is refused"):
                self.allocator.allocate(sizes)

    @rule()
    def refuse_more_than_the_pool(self) -> None:
        before = self.allocator.statistics()
        for sizes in ([before.capacity_bytes + 1], [1 << 62], [UNIT] * (before.free_bytes // UNIT + 1)):
            require(self.allocator.allocate(sizes) is None, "more than the pool has is refused", sizes[0])
        require(self.allocator.statistics() == before, "a batch that is refused changes nothing")

    @rule()
    def the_largest_free_extent_is_exact(self) -> None:
        largest = self.allocator.statistics().largest_free_extent_bytes
        refused = self.allocator.allocate([largest + 1])
        require(refused is None, "no block is larger than the largest free extent", largest)
        if largest:
            extents = self.allocator.allocate([largest])
            require(extents is not None, "a block as large as the largest free extent is placed", largest)
            assert extents is not None
            self.model.add(extents[0])
            self.free(extents)

    @invariant()
    def occupied_bytes_are_the_models(self) -> None:
        knows_where = type(self.allocator).occupied_bytes is not Allocator.occupied_bytes  # which spreads them evenly
        for arena, used_bytes in enumerate(self.model.used_bytes_by_arena):
            parts = self.allocator.occupied_bytes(arena, 7)
            require(len(parts) == 7, "as many parts are told as were asked for", parts)
            if knows_where:
                whole = self.allocator.occupied_bytes(arena, 1)
                require(whole == [used_bytes], "what is occupied is what is used", (arena, whole, used_bytes))
                require(sum(parts) == used_bytes, "the parts have together what is used", (arena, parts, used_bytes))

    @invariant()
    def statistics_are_the_models(self) -> None:
        found = self.allocator.statistics()
        require(found.name == self.contract.allocator.name, "statistics have the strategy's name", found)
        require(found.unit_bytes == UNIT, "statistics have the unit", found)
        require(found.arenas == len(self.arena_bytes), "statistics count the arenas", found)
        capacity_bytes = self.contract.capacity_bytes(self.arena_bytes)
        require(found.capacity_bytes == capacity_bytes, "the capacity is what blocks can take", (found, capacity_bytes))
        used_bytes = self.model.used_bytes
        require(found.used_bytes == used_bytes, "what is used is the sum of the footprints", (found, used_bytes))
        require(found.extents == len(self.model.extents), "statistics count the extents", found)
        largest, gap = found.largest_free_extent_bytes, self.model.largest_gap_bytes
        require(largest <= gap, "the largest free extent is no longer than the longest free run", (largest, gap))
        if self.contract.uses_any_free_run:
            require(largest == gap, "the largest free extent is the longest free run", (largest, gap))

    def teardown(self) -> None:
        """After all frees, each unit of the capacity can be given out again."""
        if sys.exc_info()[0] is not None:
            return  # a rule is broken already: say which, and not what followed from that
        self.allocator.free(self.model.extents)
        empty = self.allocator.statistics()
        require((empty.used_bytes, empty.extents) == (0, 0), "when everything is freed, nothing is used", empty)
        blocks = self.allocator.allocate([UNIT] * (empty.capacity_bytes // UNIT))
        require(blocks is not None, "when everything is freed, all of the capacity can be allocated again", empty)
        assert blocks is not None
        self.model = IntervalModel(self.allocator)
        for length in self.arena_bytes:
            self.model.add_arena(length)
        for block in blocks:
            self.model.add(block)
        self.allocator.free(blocks)
        require(self.allocator.statistics() == empty, "when everything is freed, nothing is used")
