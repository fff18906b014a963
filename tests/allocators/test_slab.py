"""What slabs promise beyond the common contract."""

import random

import pytest

from infinistore.allocators import Allocator, Extent, create_allocator

UNIT = 64 * 1024
MIB = 1024 * 1024
PAGE = 16 * UNIT


def pool(length: int) -> Allocator:
    allocator = create_allocator("slab", UNIT)
    allocator.add_arena(0, length)
    return allocator


@pytest.mark.parametrize(
    ("size", "footprint"),
    [
        (1, UNIT),
        (UNIT + 1, 2 * UNIT),
        (7 * UNIT, 7 * UNIT),
        (9 * UNIT, 9 * UNIT),
        (17 * UNIT, 18 * UNIT),
        (33 * UNIT, 36 * UNIT),
        (65 * UNIT, 72 * UNIT),
        (14 * MIB, 14 * MIB),
        (14 * MIB + 1, 15 * MIB),
        (100 * MIB + 1, 101 * MIB),
    ],
)
def test_a_footprint_is_the_slot_or_whole_pages(size: int, footprint: int) -> None:
    allocator = pool(256 * MIB)
    assert allocator.footprint(size) == footprint
    assert allocator.allocate([size]) == [(0, 0, size)]
    assert allocator.statistics().used_bytes == footprint


def test_a_slot_is_never_more_than_an_eighth_too_large() -> None:
    allocator = pool(256 * MIB)
    for units in range(1, 1000):
        assert allocator.footprint(units * UNIT) <= units * UNIT * 9 / 8


def test_an_empty_slab_serves_another_size() -> None:
    allocator = pool(64 * PAGE)
    small = allocator.allocate([UNIT] * (64 * 16))
    assert small is not None
    assert allocator.allocate([PAGE]) is None
    allocator.free(small[:15])
    assert allocator.allocate([PAGE]) is None
    allocator.free(small[15:16])
    assert allocator.allocate([PAGE]) == [(0, 0, PAGE)]


def test_a_slot_that_comes_free_is_used_before_a_new_slab() -> None:
    allocator = pool(64 * PAGE)
    blocks = allocator.allocate([UNIT] * 40)
    assert blocks is not None
    allocator.free([blocks[3]])
    assert allocator.allocate([UNIT]) == [blocks[3]]


def test_sizes_that_follow_one_another_strand_no_slabs() -> None:
    """A pool that is always full, and whose block size changes slowly, goes on storing
    as much.
    """
    capacity = 1024 * MIB
    allocator = pool(capacity)
    rnd = random.Random(5)
    live: list[list[Extent]] = []
    stored = 0
    for size in (UNIT, 3 * UNIT, 8 * UNIT, 40 * UNIT, 2 * UNIT):
        for _ in range(3 * capacity // (16 * size)):
            while (placed := allocator.allocate([size] * 16)) is None:
                evicted = live.pop(0)
                allocator.free(evicted)
                stored -= sum(length for _, _, length in evicted)
            live.insert(rnd.randrange(len(live) // 2, len(live) + 1), placed)
            stored += 16 * size
        assert stored >= 0.8 * capacity


def test_pages_are_small_in_a_small_pool() -> None:
    allocator = pool(20 * UNIT)
    extents = allocator.allocate([UNIT, 2 * UNIT, 3 * UNIT, 14 * UNIT])
    assert extents is not None
    assert allocator.statistics().used_bytes == 20 * UNIT
