"""The pool: extents as memory, and neighbours merged."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.allocators import Extent
from infinistore.core import Pool, create_arena
from tests.core.conftest import make_allocator


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Two arenas of 4 KiB, each byte different from its neighbours, and from that of
    the other arena.
    """
    pool = Pool(make_allocator("first-fit"))
    for index in range(2):
        arena = create_arena(index, 4096)
        arena.memory[:] = bytes((i * 7 + i // 256 + index * 101) % 256 for i in range(4096))
        pool.add_arena(arena)
    yield pool
    pool.close()


@st.composite
def batches(draw: Any) -> list[Extent]:
    """Extents in any order, of which many touch the one before, some leave a gap, and
    some are in another arena.
    """
    extents: list[Extent] = []
    for _ in range(draw(st.integers(0, 12))):
        length = draw(st.integers(1, 100))
        if extents and draw(st.integers(0, 3)):
            arena, offset, before = extents[-1]
            gap = draw(st.sampled_from([0, 0, 0, 0, 1, -1]))
            other = draw(st.sampled_from([0, 0, 0, 0, 1]))  # there, the offset alone says nothing
            extents.append((arena ^ other, offset + before + gap, length))
        else:
            extents.append((draw(st.integers(0, 1)), draw(st.integers(0, 2000)), length))
    return extents


@given(extents=batches(), writable=st.booleans())
def test_merged_views_hold_the_same_bytes_in_as_few_pieces_as_touch(
    pool: Pool, extents: list[Extent], writable: bool
) -> None:
    merged: list[list[int]] = []  # [arena, start, end], made the plain way
    for arena, offset, length in extents:
        if merged and merged[-1][0] == arena and merged[-1][2] == offset:
            merged[-1][2] += length
        else:
            merged.append([arena, offset, offset + length])
    views = pool.merged_views(extents, writable=writable)
    assert [bytes(view) for view in views] == [bytes(pool.arenas[a].memory[i:j]) for a, i, j in merged]
    assert all(view.readonly is not writable for view in views)
    single = pool.views(extents, writable=writable)
    assert [len(view) for view in single] == [length for _, _, length in extents]
    assert b"".join(single) == b"".join(views) == b"".join(map(pool.view, extents))


def test_blocks_of_two_arenas_never_touch(pool: Pool) -> None:
    assert len(pool.merged_views([(0, 0, 64), (1, 64, 64)])) == 2
    assert len(pool.merged_views([(0, 0, 64), (1, 64, 64), (1, 0, 64)])) == 3


def test_used_bytes_are_footprints(pool: Pool) -> None:
    extents = pool.allocate([1, 64, 65])
    assert extents is not None
    assert pool.used_bytes == 64 + 64 + 128 == pool.statistics().used_bytes
    pool.free(extents[1:])
    assert pool.used_bytes == 64
    with pytest.raises(ValueError, match="allocated"):
        pool.free(extents[1:])
    assert pool.used_bytes == 64
    pool.free(extents[:1])
    assert pool.allocate([5000]) is None
    assert pool.used_bytes == 0


def test_arenas_are_added_in_order() -> None:
    pool = Pool(make_allocator("first-fit"))
    arena = create_arena(1, 4096)
    with pytest.raises(ValueError, match="index 0, not 1"):
        pool.add_arena(arena)
    assert (pool.capacity_bytes, pool.largest_arena_bytes) == (0, 0)
    arena.close()


def test_footprints_that_depend_on_the_first_arena_are_not_remembered_from_before_it() -> None:
    pool = Pool(make_allocator("slab"))
    before = pool.footprint(65)
    pool.add_arena(create_arena(0, 1 << 20))
    assert pool.footprint(65) == pool.allocator.footprint(65)
    extents = pool.allocate([65, before])
    assert extents is not None
    assert pool.used_bytes == pool.statistics().used_bytes
    pool.close()


def test_capacity_is_what_the_allocator_can_use() -> None:
    pool = Pool(make_allocator("first-fit", unit_bytes=3 * 1024 - 3 * 1024 % 64))
    pool.add_arena(create_arena(0, 4096))
    pool.add_arena(create_arena(1, 8192))
    assert pool.capacity_bytes == 3072 + 2 * 3072
    assert pool.largest_arena_bytes == 2 * 3072
    pool.close()
