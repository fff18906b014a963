"""Allocators that take the places that one of an earlier process has chosen."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinistore.allocators import Allocator, Extent, create_allocator
from tests.examples import examples

UNIT = 64
STRATEGIES = ["bitmap", "slab"]


def made(strategy: str, arenas: list[int]) -> Allocator:
    allocator = create_allocator(strategy, UNIT)
    for index, units in enumerate(arenas):
        allocator.add_arena(index, units * UNIT)
    return allocator


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=examples(40))
@given(
    arenas=st.lists(st.integers(0, 1500), min_size=1, max_size=3),
    batches=st.lists(st.lists(st.integers(1, 200 * UNIT), min_size=1, max_size=12), max_size=30),
    seed=st.integers(0, 1 << 20),
    parts=st.integers(1, 3),
)
def test_all_that_was_placed_is_adopted_and_can_be_freed(
    strategy: str, arenas: list[int], batches: list[list[int]], seed: int, parts: int
) -> None:
    random = Random(seed)
    old = made(strategy, arenas)
    extents: list[Extent] = []
    for sizes in batches:
        extents += old.allocate(sizes) or []
        random.shuffle(extents)
        gone = len(extents) * random.randrange(4) // 6
        old.free(extents[:gone])
        del extents[:gone]
    new = made(strategy, arenas)
    for part in range(parts):
        assert all(new.adopt(extents[part::parts]))
    before, after = old.statistics(), new.statistics()
    assert (after.used_bytes, after.extents) == (before.used_bytes, before.extents)
    assert not any(new.adopt(extents))
    more = new.allocate([UNIT] * 3) or []
    assert not {extent[:2] for extent in more} & {extent[:2] for extent in extents}
    new.free([*extents, *more])
    empty = made(strategy, arenas).statistics()
    assert new.statistics() == empty


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=examples(40))
@given(
    wanted=st.lists(
        st.tuples(st.integers(-1, 2), st.integers(-UNIT, 600 * UNIT), st.integers(-1, 300 * UNIT)), max_size=40
    )
)
def test_of_any_places_those_are_adopted_that_do_not_overlap(strategy: str, wanted: list[Extent]) -> None:
    allocator = made(strategy, [500, 300])
    adopted = [extent for extent, taken in zip(wanted, allocator.adopt(wanted), strict=True) if taken]
    units: set[tuple[int, int]] = set()
    for arena, offset, size in adopted:
        own = {(arena, unit) for unit in range(offset // UNIT, -(-(offset + size) // UNIT))}
        assert own.isdisjoint(units)
        assert max(own)[1] < [500, 300][arena]
        units |= own
    assert allocator.statistics().extents == len(adopted)
    allocator.free(adopted)
    assert allocator.statistics() == made(strategy, [500, 300]).statistics()
