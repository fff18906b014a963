"""Where the bitmap strategy puts blocks."""

import random

from infinistore.allocators import create_allocator

UNIT = 64 * 1024
MIB = 1024 * 1024


def test_the_next_batch_follows_the_last_one_and_does_not_start_at_zero() -> None:
    allocator = create_allocator("bitmap", UNIT)
    allocator.add_arena(0, 100 * UNIT)
    first = allocator.allocate([UNIT] * 10)
    assert first is not None
    allocator.free(first)
    second = allocator.allocate([UNIT] * 10)
    assert second == [(0, index * UNIT, UNIT) for index in range(10, 20)]


def test_a_batch_takes_the_one_hole_that_holds_it_whole() -> None:
    allocator = create_allocator("bitmap", UNIT)
    allocator.add_arena(0, 1000 * UNIT)
    blocks = allocator.allocate([UNIT] * 1000)
    assert blocks is not None
    allocator.free([*blocks[:600:20], *blocks[601:640]])
    placed = allocator.allocate([UNIT] * 32)
    assert placed is not None
    start = placed[0][1] // UNIT
    assert placed == [(0, (start + index) * UNIT, UNIT) for index in range(32)]
    assert 601 <= start <= 640 - 32


def test_without_such_a_hole_a_batch_is_placed_in_pieces() -> None:
    allocator = create_allocator("bitmap", UNIT)
    allocator.add_arena(0, 1000 * UNIT)
    blocks = allocator.allocate([UNIT] * 1000)
    assert blocks is not None
    allocator.free(blocks[::2])
    placed = allocator.allocate([UNIT] * 500)
    assert placed is not None
    assert sorted(placed) == blocks[::2]


def test_a_large_block_takes_the_shortest_hole_that_fits() -> None:
    allocator = create_allocator("bitmap", UNIT)
    allocator.add_arena(0, 200 * MIB)
    blocks = allocator.allocate([MIB] * 200)
    assert blocks is not None
    allocator.free([*blocks[10:50], *blocks[100:115], *blocks[150:180]])
    assert allocator.allocate([14 * MIB]) == [(0, 100 * MIB, 14 * MIB)]
    assert allocator.allocate([14 * MIB]) == [(0, 150 * MIB, 14 * MIB)]
    assert allocator.allocate([32 * MIB]) == [(0, 10 * MIB, 32 * MIB)]


def test_in_a_full_pool_of_large_blocks_small_ones_leave_the_long_holes_alone() -> None:
    allocator = create_allocator("bitmap", UNIT)
    allocator.add_arena(0, 1000 * UNIT)
    large = allocator.allocate([100 * UNIT] * 8)
    small = allocator.allocate([UNIT] * 200)
    assert large is not None
    assert small is not None
    crumbs = sorted(small)[10::20]
    allocator.free([large[3], *crumbs])
    assert allocator.allocate([UNIT] * 10) == crumbs
    assert allocator.allocate([100 * UNIT]) == [large[3]]


def test_a_mixed_batch_that_fits_in_one_hole_only_as_a_whole_is_placed_there() -> None:
    """Placing its largest block where it fits best would leave no room for the
    others.
    """
    allocator = create_allocator("bitmap", UNIT)
    allocator.add_arena(0, 100 * MIB)
    blocks = allocator.allocate([MIB] * 100)
    assert blocks is not None
    allocator.free([*blocks[10:15], *blocks[20:26], blocks[40]])
    sizes = [3 * MIB, 3 * MIB, 3 * MIB]
    assert allocator.allocate(sizes) is not None
    assert allocator.statistics().largest_free_extent_bytes == 2 * MIB


def test_blocks_go_to_every_arena_and_never_across_the_edge_of_one() -> None:
    allocator = create_allocator("bitmap", UNIT)
    for index, units in enumerate((7, 64, 3)):
        allocator.add_arena(index, units * UNIT + 17)
    extents = []
    while (placed := allocator.allocate([2 * UNIT])) is not None:
        extents += placed
    assert [sum(arena == index for arena, _, _ in extents) for index in range(3)] == [3, 32, 1]
    singles = allocator.allocate([UNIT] * 2)
    assert singles is not None
    assert sorted(singles) == [(0, 6 * UNIT, UNIT), (2, 2 * UNIT, UNIT)]
    random.Random(1).shuffle(extents)
    allocator.free([*extents, *singles])
    assert allocator.statistics().used_bytes == 0
