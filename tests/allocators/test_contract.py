"""The strategies keep the contract of `Allocator`: the suite that other packages run on
theirs, and what ours add.
"""

from collections.abc import Sequence
from typing import ClassVar

import pytest
from hypothesis import settings

from examples.first_fit_allocator import FirstFitAllocator
from infinistore.allocators import Allocator, allocator_class, create_allocator
from infinistore.allocators.contract import UNIT, AllocatorContract
from tests.allocators.processes import STRATEGIES, needs_jemalloc
from tests.examples import examples


class OurContract(AllocatorContract):
    """Ours also say the same things in the same words."""

    refused_arena = r"is next, of zero bytes or more"
    refused_free = r"allocated|twice"
    refused_size = r"at least one byte"


class TestBitmap(OurContract):
    allocator = allocator_class("bitmap")
    uses_any_free_run = True


class TestSlab(OurContract):
    allocator = allocator_class("slab")
    any_smaller_block_fits = False  # a free slot serves only its own size class

    def capacity_bytes(self, arena_bytes: Sequence[int]) -> int:
        """Whole pages, which the length of the first arena decides."""
        page_units = 16
        while page_units > 1 and sum(arena_bytes[:1]) // UNIT < 64 * page_units:
            page_units //= 2
        page_bytes = page_units * UNIT
        return sum(length // page_bytes * page_bytes for length in arena_bytes)


@needs_jemalloc
class TestJemalloc(OurContract):
    allocator = allocator_class("jemalloc")


class TestFirstFit(AllocatorContract):
    """The example: what the contract leaves to a strategy is as by default."""

    allocator: ClassVar[type[Allocator]] = FirstFitAllocator
    settings = settings(max_examples=examples(20))


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_arena_is_filled_from_its_beginning(name: str) -> None:
    allocator = create_allocator(name, UNIT)
    allocator.add_arena(0, UNIT - 1)
    allocator.add_arena(1, 10 * UNIT)
    assert allocator.allocate([1]) == [(1, 0, 1)]
