"""The contract of `Allocator`, for every strategy: the same rules against the same interval model."""

import random
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from infinistore.allocators import Allocator, create_allocator
from infinistore.errors import ConfigError
from tests.allocators.interval_model import IntervalModel
from tests.allocators.processes import STRATEGIES, needs_jemalloc

UNIT = 64

LENGTHS = st.one_of(
    st.integers(0, 40 * UNIT),
    st.integers(100 * UNIT, 300 * UNIT),
    st.integers(1100 * UNIT, 1500 * UNIT),  # large enough for the slab strategy's full pages
)
SIZES = st.one_of(
    st.sampled_from([1, UNIT, UNIT + 1, 3 * UNIT, 7 * UNIT, 16 * UNIT]),
    st.integers(1, 40 * UNIT),
    st.integers(1, 400 * UNIT),
)


class AllocatorMachine(RuleBasedStateMachine):
    strategy: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.allocator: Allocator = create_allocator(self.strategy, UNIT)
        self.model = IntervalModel(self.allocator)
        self.arenas = 0

    @initialize(length=LENGTHS)
    def add_first_arena(self, length: int) -> None:
        self.add_arena(length)

    @precondition(lambda self: self.arenas < 4)
    @rule(length=LENGTHS)
    def add_arena(self, length: int) -> None:
        with pytest.raises(ValueError, match="is next"):
            self.allocator.add_arena(self.arenas + 1, length)
        self.allocator.add_arena(self.arenas, length)
        self.model.add_arena(length)
        self.arenas += 1

    @rule(sizes=st.lists(SIZES, max_size=12))
    def allocate_a_mixed_batch(self, sizes: list[int]) -> None:
        self.allocate(sizes)

    @rule(size=SIZES, count=st.integers(1, 70))
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
            assert self.allocator.statistics() == before
            if len(sizes) == 1 and self.strategy != "slab":  # where a free slot serves only its own class
                assert sizes[0] > before.largest_free_extent_bytes
            if self.strategy == "bitmap":
                assert sum(map(self.allocator.footprint, sizes)) > self.model.largest_gap_bytes
            return
        assert [length for _, _, length in extents] == sizes
        assert all(type(extent) is tuple for extent in extents)
        for extent in extents:
            self.model.add(extent)

    @precondition(lambda self: self.model.extents)
    @rule(seed=st.randoms(use_true_random=False), count=st.integers(1, 70))
    def free_some(self, seed: random.Random, count: int) -> None:
        chosen = seed.sample(self.model.extents, min(count, len(self.model.extents)))
        self.allocator.free(chosen)
        for extent in chosen:
            self.model.remove(extent)
        self.refuses_to_free([chosen[0]])

    @precondition(lambda self: self.model.extents)
    @rule(seed=st.randoms(use_true_random=False))
    def free_everything_of_one_size(self, seed: random.Random) -> None:
        size = seed.choice(self.model.extents)[2]
        chosen = [extent for extent in self.model.extents if extent[2] == size]
        self.allocator.free(chosen)
        for extent in chosen:
            self.model.remove(extent)

    @precondition(lambda self: self.model.extents)
    @rule(seed=st.randoms(use_true_random=False))
    def refuse_foreign_extents(self, seed: random.Random) -> None:
        extents = self.model.extents
        valid = seed.sample(extents, min(3, len(extents)))
        arena, offset, length = seed.choice(extents)
        self.refuses_to_free([*valid, valid[0]])
        for foreign in (
            (arena, offset + 1, length),
            (arena, -UNIT, length),
            (arena, offset, 0),
            (arena, offset, -length),
            (arena, offset, 100_000 * UNIT),
            (arena, 100_000 * UNIT + offset, length),
            (self.arenas, offset, length),
            (-1, offset, length),
        ):
            self.refuses_to_free([*valid, foreign])
            self.refuses_to_free([foreign])
        for shift in (-UNIT, UNIT):
            if (arena, offset + shift, length) not in extents and not any(
                extent[:2] == (arena, offset + shift)
                and self.allocator.footprint(extent[2]) == self.allocator.footprint(length)
                for extent in extents
            ):
                self.refuses_to_free([(arena, offset + shift, length)])
            other = length + shift
            if other > 0 and self.allocator.footprint(other) != self.allocator.footprint(length):
                self.refuses_to_free([(arena, offset, other)])

    def refuses_to_free(self, extents: list[tuple[int, int, int]]) -> None:
        before = self.allocator.statistics()
        with pytest.raises(ValueError, match=r"allocated|twice"):
            self.allocator.free(extents)
        assert self.allocator.statistics() == before

    @rule(size=st.integers(-(1 << 40), 0))
    def refuse_a_size_of_nothing(self, size: int) -> None:
        for sizes in ([size], [1, size], [size, size]):
            with pytest.raises(ValueError, match="at least one byte"):
                self.allocator.allocate(sizes)

    @rule()
    def refuse_more_than_the_pool(self) -> None:
        before = self.allocator.statistics()
        assert self.allocator.allocate([before.capacity_bytes + 1]) is None
        assert self.allocator.allocate([1 << 62]) is None
        assert self.allocator.allocate([UNIT] * (before.free_bytes // UNIT + 1)) is None
        assert self.allocator.statistics() == before

    @rule()
    def the_largest_free_extent_is_exact(self) -> None:
        largest = self.allocator.statistics().largest_free_extent_bytes
        assert self.allocator.allocate([largest + 1]) is None
        if largest:
            extents = self.allocator.allocate([largest])
            assert extents is not None
            self.model.add(extents[0])
            self.model.remove(extents[0])
            self.allocator.free(extents)

    @invariant()
    def occupied_bytes_are_the_models(self) -> None:
        for arena, used_bytes in enumerate(self.model.used_bytes_by_arena):
            assert self.allocator.occupied_bytes(arena, 1) == [used_bytes]
            parts = self.allocator.occupied_bytes(arena, 7)
            assert (len(parts), sum(parts)) == (7, used_bytes)

    @invariant()
    def statistics_are_the_models(self) -> None:
        found = self.allocator.statistics()
        page_units = 1
        if self.strategy == "slab":
            page_units = 16
            while page_units > 1 and self.model.first_arena_units < 64 * page_units:
                page_units //= 2
        assert found.name == self.strategy
        assert found.unit_bytes == UNIT
        assert found.arenas == self.arenas
        assert found.capacity_bytes == self.model.capacity_bytes(page_units)
        assert found.used_bytes == self.model.used_bytes
        assert found.extents == len(self.model.extents)
        assert found.largest_free_extent_bytes <= self.model.largest_gap_bytes
        if self.strategy == "bitmap":
            assert found.largest_free_extent_bytes == self.model.largest_gap_bytes

    def teardown(self) -> None:
        """All room is back after all frees: each unit of the capacity can be given out again."""
        self.allocator.free(self.model.extents)
        empty = self.allocator.statistics()
        assert (empty.used_bytes, empty.extents) == (0, 0)
        blocks = self.allocator.allocate([UNIT] * (empty.capacity_bytes // UNIT))
        assert blocks is not None
        assert len(set(blocks)) == len(blocks)
        self.allocator.free(blocks)
        assert self.allocator.statistics() == empty


class BitmapMachine(AllocatorMachine):
    strategy = "bitmap"


class SlabMachine(AllocatorMachine):
    strategy = "slab"


class JemallocMachine(AllocatorMachine):
    strategy = "jemalloc"


TestBitmap = BitmapMachine.TestCase
TestSlab = SlabMachine.TestCase
TestJemalloc = needs_jemalloc(JemallocMachine.TestCase)


@pytest.mark.parametrize("name", STRATEGIES)
def test_nothing_can_be_placed_before_the_first_arena(name: str) -> None:
    allocator = create_allocator(name, UNIT)
    assert allocator.allocate([1]) is None
    assert allocator.allocate([]) == []
    assert allocator.statistics().largest_free_extent_bytes == 0


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_empty_arena_is_allowed_and_holds_nothing(name: str) -> None:
    allocator = create_allocator(name, UNIT)
    allocator.add_arena(0, UNIT - 1)
    assert allocator.allocate([1]) is None
    allocator.add_arena(1, 10 * UNIT)
    assert allocator.allocate([1]) == [(1, 0, 1)]


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_arena_of_negative_length_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="zero bytes or more"):
        create_allocator(name, UNIT).add_arena(0, -1)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("unit_bytes", [-64, 0, 1, 63, 100])
def test_a_unit_that_is_no_multiple_of_a_cache_line_is_refused(name: str, unit_bytes: int) -> None:
    with pytest.raises(ConfigError, match="multiple of 64"):
        create_allocator(name, unit_bytes)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("size", [UNIT, UNIT - 5, 3 * UNIT, 8 * UNIT])
def test_a_batch_in_an_empty_pool_lies_in_one_piece(name: str, size: int) -> None:
    allocator = create_allocator(name, UNIT)
    allocator.add_arena(0, 4096 * UNIT)
    extents = allocator.allocate([size] * 16)
    assert extents is not None
    first = extents[0][1]
    assert extents == [(0, first + index * allocator.footprint(size), size) for index in range(16)]


@pytest.mark.parametrize("name", STRATEGIES)
def test_sizes_may_be_any_sequence_and_extents_any_iterable(name: str) -> None:
    allocator = create_allocator(name, UNIT)
    allocator.add_arena(0, 100 * UNIT)
    extents = allocator.allocate((1, 2, UNIT * 2))
    assert extents is not None
    allocator.free(iter(extents))
    allocator.free([])
    assert allocator.statistics().used_bytes == 0


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_pool_can_be_filled_emptied_and_filled_with_another_size(name: str) -> None:
    """A change of block size strands nothing."""
    allocator = create_allocator(name, UNIT)
    allocator.add_arena(0, 4096 * UNIT)
    for units in (1, 4, 2, 16, 3, 64, 1):
        extents = []
        while (placed := allocator.allocate([units * UNIT])) is not None:
            extents += placed
        used = allocator.statistics().used_bytes
        assert used >= 0.93 * 4096 * UNIT
        assert allocator.statistics().largest_free_extent_bytes < units * UNIT
        random.Random(units).shuffle(extents)
        allocator.free(extents)
    assert allocator.statistics().used_bytes == 0
