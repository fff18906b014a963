"""Where the bitmap strategy puts blocks, and which ones it frees."""

import random
from collections.abc import Sequence

import pytest

from infinistore.allocators import Allocator, AllocatorStatistics, Extent, create_allocator

UNIT = 64 * 1024
MIB = 1024 * 1024


def pool(*units: int) -> Allocator:
    """Return an allocator with arenas of so many units."""
    allocator = create_allocator("bitmap", UNIT)
    for index, count in enumerate(units):
        allocator.add_arena(index, count * UNIT)
    return allocator


def placed(allocator: Allocator, *units: int) -> list[Extent]:
    """Place a batch of blocks of so many units."""
    extents = allocator.allocate([count * UNIT for count in units])
    assert extents is not None
    return extents


def at(*places: int) -> list[Extent]:
    """Return the extents of a unit each at these units of the first arena."""
    return [(0, place * UNIT, UNIT) for place in places]


def test_the_next_batch_follows_the_last_one_and_does_not_start_at_zero() -> None:
    allocator = pool(100)
    allocator.free(placed(allocator, *[1] * 10))
    assert placed(allocator, *[1] * 10) == at(*range(10, 20))


def test_a_batch_takes_the_one_hole_that_holds_it_whole() -> None:
    allocator = pool(1000)
    blocks = placed(allocator, *[1] * 1000)
    allocator.free([*blocks[:600:20], *blocks[601:640]])
    batch = placed(allocator, *[1] * 32)
    start = batch[0][1] // UNIT
    assert batch == at(*range(start, start + 32))
    assert 601 <= start <= 640 - 32


def test_without_such_a_hole_a_batch_is_placed_in_pieces() -> None:
    allocator = pool(1000)
    blocks = placed(allocator, *[1] * 1000)
    allocator.free(blocks[::2])
    assert sorted(placed(allocator, *[1] * 500)) == blocks[::2]


def test_a_large_block_takes_the_shortest_hole_that_fits() -> None:
    allocator = pool(200 * 16)
    blocks = placed(allocator, *[16] * 200)
    allocator.free([*blocks[10:50], *blocks[100:115], *blocks[150:180]])
    assert allocator.allocate([14 * MIB]) == [(0, 100 * MIB, 14 * MIB)]
    assert allocator.allocate([14 * MIB]) == [(0, 150 * MIB, 14 * MIB)]
    assert allocator.allocate([32 * MIB]) == [(0, 10 * MIB, 32 * MIB)]


def test_in_a_full_pool_of_large_blocks_small_ones_leave_the_long_holes_alone() -> None:
    allocator = pool(1000)
    large = placed(allocator, *[100] * 8)
    crumbs = sorted(placed(allocator, *[1] * 200))[10::20]
    allocator.free([large[3], *crumbs])
    assert placed(allocator, *[1] * 10) == crumbs
    assert placed(allocator, 100) == [large[3]]


def test_a_mixed_batch_that_fits_in_one_hole_only_as_a_whole_is_placed_there() -> None:
    """Placing its largest block where it fits best would leave no room for the
    others.
    """
    allocator = pool(100 * 16)
    blocks = placed(allocator, *[16] * 100)
    allocator.free([*blocks[10:15], *blocks[20:26], blocks[40]])
    placed(allocator, *[3 * 16] * 3)
    assert allocator.statistics().largest_free_extent_bytes == 2 * MIB


def test_blocks_go_to_every_arena_and_never_across_the_edge_of_one() -> None:
    allocator = create_allocator("bitmap", UNIT)
    for index, units in enumerate((7, 64, 3)):
        allocator.add_arena(index, units * UNIT + 17)
    extents = []
    while (pair := allocator.allocate([2 * UNIT])) is not None:
        extents += pair
    assert [sum(arena == index for arena, _, _ in extents) for index in range(3)] == [3, 32, 1]
    singles = placed(allocator, 1, 1)
    assert sorted(singles) == [(0, 6 * UNIT, UNIT), (2, 2 * UNIT, UNIT)]
    random.Random(1).shuffle(extents)
    allocator.free([*extents, *singles])
    assert allocator.statistics().used_bytes == 0


def test_scattered_blocks_take_the_next_free_units_and_then_the_first_ones() -> None:
    allocator = pool(100)
    allocator.free(placed(allocator, *[1] * 100)[::10])
    assert placed(allocator, *[1] * 3) == at(0, 10, 20)
    assert placed(allocator, *[1] * 3) == at(30, 40, 50)
    assert placed(allocator, 1, 1) == at(60, 70)
    allocator.free(at(0, 10, 20, 30))
    assert placed(allocator, *[1] * 4) == at(80, 90, 0, 10)
    assert placed(allocator, 1, 1) == at(20, 30)
    assert allocator.allocate([UNIT]) is None


@pytest.mark.parametrize("gap", [1, 2, 3, 4])
def test_a_batch_prefers_one_hole_to_next_units_with_a_gap(gap: int) -> None:
    allocator = pool(200)
    blocks = placed(allocator, *[1] * 200)
    allocator.free([blocks[10], *blocks[11 + gap : 18 + gap], *blocks[100:110]])
    assert placed(allocator, *[1] * 8) == at(*range(100, 108))


def test_a_search_for_a_hole_that_failed_is_repeated_when_four_times_the_batch_was_freed() -> None:
    allocator = pool(200)
    blocks = placed(allocator, *[1] * 200)
    allocator.free(blocks[:100:2])
    assert placed(allocator, *[1] * 8) == at(*range(0, 16, 2))
    allocator.free(blocks[100:108])
    assert placed(allocator, *[1] * 8) == at(*range(16, 32, 2))  # 8 were freed since, and 32 have to be
    allocator.free(blocks[121:167:2])
    assert placed(allocator, *[1] * 8) == at(*range(32, 48, 2))  # 31
    allocator.free([blocks[167]])
    assert placed(allocator, *[1] * 8) == at(*range(100, 108))


def test_a_new_arena_is_looked_at_although_a_search_has_just_failed() -> None:
    allocator = pool(40)
    allocator.free(placed(allocator, *[1] * 40)[:20:2])
    assert placed(allocator, 1, 1, 1) == at(0, 2, 4)
    allocator.add_arena(1, 20 * UNIT)
    assert placed(allocator, *[1] * 8) == [(1, unit * UNIT, UNIT) for unit in range(8)]


def test_a_mixed_batch_that_takes_all_that_is_free_lies_in_its_order() -> None:
    assert placed(pool(6), 1, 3, 2) == [(0, 0, UNIT), (0, UNIT, 3 * UNIT), (0, 4 * UNIT, 2 * UNIT)]


@pytest.mark.parametrize(
    ("large", "small", "crumb", "first", "second"),
    [
        (70, 6, 72, 76, 72),  # a quarter is free, and then less
        (58, 19, 60, 77, 78),  # a quarter as many blocks as units in use
        (59, 18, 61, 61, 77),
    ],
)
def test_small_blocks_fill_crumbs_only_in_a_pool_that_is_crowded_with_large_ones(
    large: int, small: int, crumb: int, first: int, second: int
) -> None:
    allocator = pool(100)
    placed(allocator, large)
    placed(allocator, *[1] * small)
    allocator.free(at(crumb))
    assert placed(allocator, 1) == at(first)
    assert placed(allocator, 1) == at(second)


@pytest.mark.parametrize(("units", "starts"), [(7, [30, 37]), (8, [1, 15])])
def test_blocks_below_half_a_mebibyte_lie_side_by_side_and_larger_ones_where_they_fit_best(
    units: int, starts: list[int]
) -> None:
    allocator = pool(200)
    blocks = placed(allocator, *[1] * 200)
    allocator.free([*blocks[1 : 1 + units], *blocks[15 : 15 + units], *blocks[30 : 30 + 2 * units]])
    assert placed(allocator, units, units) == [(0, start * UNIT, units * UNIT) for start in starts]


@pytest.mark.parametrize("batch", [(8, 16), (16, 8)])
def test_the_largest_block_of_a_batch_chooses_first(batch: tuple[int, int]) -> None:
    allocator = pool(200)
    blocks = placed(allocator, *[1] * 200)
    allocator.free([*blocks[1:17], *blocks[30:54]])
    starts = {16: 1, 8: 30}
    assert placed(allocator, *batch) == [(0, starts[units] * UNIT, units * UNIT) for units in batch]


def test_a_batch_may_lie_in_several_arenas() -> None:
    allocator = pool(3, 3)
    assert placed(allocator, *[1] * 6) == [(arena, unit * UNIT, UNIT) for arena in (0, 1) for unit in range(3)]
    allocator = pool(4, 6, 4)
    first = placed(allocator, 2, 2)
    assert first == [(0, 0, 2 * UNIT), (0, 2 * UNIT, 2 * UNIT)]
    assert placed(allocator, 2, 2, 2) == [(1, unit * UNIT, 2 * UNIT) for unit in (0, 2, 4)]
    allocator.free(first[1:])
    assert placed(allocator, 2, 2, 2) == [(0, 2 * UNIT, 2 * UNIT), (2, 0, 2 * UNIT), (2, 2 * UNIT, 2 * UNIT)]


def test_statistics_say_what_is_held() -> None:
    allocator = pool(5, 3)
    placed(allocator, 2, 1)
    assert allocator.statistics() == AllocatorStatistics(
        name="bitmap",
        unit_bytes=UNIT,
        arenas=2,
        capacity_bytes=8 * UNIT,
        used_bytes=3 * UNIT,
        extents=2,
        largest_free_extent_bytes=3 * UNIT,
    )


@pytest.mark.parametrize("arena", [0, 1])
@pytest.mark.parametrize(
    "units",
    [
        *([3, 4], [3, 5], [9, 8], [0, 1, 2], [9, 7, 8], [7, 8, 9], [0, 9], [5]),
        range(10),
        range(9, -1, -1),
    ],
)
def test_blocks_of_a_unit_are_freed_together_and_nothing_else_is(arena: int, units: Sequence[int]) -> None:
    allocator = pool(10, 10, 3)
    blocks = placed(allocator, *[1] * 23)
    chosen = [(arena, unit * UNIT, UNIT - 5) for unit in units]  # a length of the same footprint
    allocator.free(chosen)
    assert allocator.statistics().used_bytes == (23 - len(units)) * UNIT
    assert allocator.statistics().extents == 23 - len(units)
    with pytest.raises(ValueError, match="not an allocated extent"):
        allocator.free(chosen)
    left = [block for block in blocks if (*block[:2], UNIT - 5) not in chosen]
    allocator.free(left)
    assert allocator.statistics() == pool(10, 10, 3).statistics()


def test_extents_of_all_kinds_are_freed_together() -> None:
    allocator = pool(10, 10)
    allocator.free([*placed(allocator, 1, 3, 2, 1), *placed(allocator, 2, 2, 5, 1), *placed(allocator, 1, 1)])
    assert allocator.statistics() == pool(10, 10).statistics()


# Two arenas of ten units: in the first, blocks of a unit at 0 to 4, of two units at 5
# and 7, and nothing at 9; the second one is full of blocks of a unit.
WRONG = [
    [(-1, 0), (-1, UNIT)],
    [(2, 0), (2, UNIT)],
    [(2, 0), (2, 3 * UNIT)],
    [(0, -UNIT), (0, 0)],
    [(0, 2 * UNIT), (0, -UNIT)],
    [(1, -UNIT), (1, 0)],
    [(1, -2 * UNIT), (1, 0)],  # it would be a unit of the first arena
    [(0, 64), (0, UNIT + 64)],
    [(0, 0), (0, UNIT), (0, 2 * UNIT + 64)],
    [(0, 64), (0, 3 * UNIT - 64)],  # as many bytes as if they were whole units
    [(1, 8 * UNIT), (1, 9 * UNIT), (1, 10 * UNIT)],
    [(1, 0), (1, 10 * UNIT)],
    [(1, 0), (1, 20 * UNIT)],
    [(0, 10 * UNIT), (0, 11 * UNIT)],
    [(0, 3 * UNIT), (0, 4 * UNIT), (0, 5 * UNIT)],  # the beginning of a longer one
    [(0, 0), (0, 5 * UNIT)],
    [(0, 7 * UNIT), (0, 0)],
    [(0, 4 * UNIT), (0, 6 * UNIT)],  # the end of a longer one
    [(0, 6 * UNIT), (0, 7 * UNIT)],
    [(0, 8 * UNIT), (0, 9 * UNIT)],
    [(0, 0), (0, 9 * UNIT)],
    [(0, 0), (0, 0)],
    [(0, 0), (0, 2 * UNIT), (0, 0)],
    [(0, 2 * UNIT), (1, 2 * UNIT), (0, 2 * UNIT)],
]


@pytest.mark.parametrize("wrong", WRONG)
def test_of_extents_of_which_one_is_wrong_none_is_freed(wrong: list[tuple[int, int]]) -> None:
    allocator = pool(10, 10)
    filled = [*placed(allocator, *[1] * 5), *placed(allocator, 2), *placed(allocator, 2), *placed(allocator, *[1] * 11)]
    allocator.free([filled.pop(7)])
    assert [block[:2] for block in filled[4:8]] == [(0, 4 * UNIT), (0, 5 * UNIT), (0, 7 * UNIT), (1, 0)]
    before = allocator.statistics()
    with pytest.raises(ValueError, match=r"allocated extent|freed twice"):
        allocator.free([(arena, offset, UNIT) for arena, offset in wrong])
    assert allocator.statistics() == before
    allocator.free(filled)
    assert allocator.statistics() == pool(10, 10).statistics()


@pytest.mark.parametrize("lengths", [(UNIT, 2 * UNIT), (0, 0), (0, UNIT), (-UNIT, -UNIT), (2 * UNIT, 2 * UNIT)])
def test_extents_of_other_lengths_are_not_freed(lengths: tuple[int, int]) -> None:
    allocator = pool(10)
    blocks = placed(allocator, *[1] * 10)
    for places in ((0, 1), (3, 7)):
        with pytest.raises(ValueError, match="not an allocated extent"):
            allocator.free([(0, place * UNIT, length) for place, length in zip(places, lengths, strict=True)])
    allocator.free(blocks)
    assert allocator.statistics() == pool(10).statistics()


@pytest.mark.parametrize(
    ("extent", "adopted"),
    [
        ((0, 9 * UNIT, UNIT), True),
        ((0, 8 * UNIT, UNIT + 1), True),
        ((1, 0, 10 * UNIT), True),
        ((0, 9 * UNIT, UNIT + 1), False),
        ((1, 20 * UNIT, 15 * UNIT), False),
        ((1, 10 * UNIT, UNIT), False),
        ((2, 0, UNIT), False),
        ((-1, 0, UNIT), False),
        ((0, -UNIT, UNIT), False),
        ((0, UNIT + 64, UNIT), False),
        ((0, 0, 0), False),
        ((0, 3 * UNIT, UNIT), False),
        ((0, 2 * UNIT, 2 * UNIT), False),
    ],
)
def test_a_place_is_adopted_if_it_is_of_whole_units_and_free(extent: Extent, adopted: bool) -> None:
    allocator = pool(10, 10)
    assert allocator.adopt([(0, 3 * UNIT, UNIT)]) == [True]
    assert allocator.adopt([extent]) == [adopted]
    used = 1 + adopted * -(-extent[2] // UNIT)
    assert allocator.statistics().used_bytes == used * UNIT
    allocator.free([(0, 3 * UNIT, UNIT), *([extent] if adopted else [])])
    assert allocator.statistics() == pool(10, 10).statistics()
