"""Small stores for the tests of the core: 64-byte units, arenas of a page or more, a
clock that stands still.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from examples.first_fit_allocator import FirstFitAllocator
from infinistore.allocators import Allocator, create_allocator
from infinistore.core import Client, Pool, StoreCore, Watermarks, create_arena

UNIT_BYTES = 64


class FakeClock:
    """Shows `now` seconds, until a test changes it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_allocator(name: str, unit_bytes: int = UNIT_BYTES) -> Allocator:
    return FirstFitAllocator(unit_bytes) if name == "first-fit" else create_allocator(name, unit_bytes)


@pytest.fixture(params=["bitmap", pytest.param("first-fit", marks=pytest.mark.nightly)])
def allocator_name(request: pytest.FixtureRequest) -> str:
    """What every test of the store runs with. The state machine has more of them."""
    name: str = request.param
    return name


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def make_core(allocator_name: str, clock: FakeClock) -> Iterator[Callable[..., StoreCore]]:
    """Returns make_core(*arena_bytes, **options of StoreCore); without watermarks it
    fills up to the last byte.
    """
    pools: list[Pool] = []

    def create(*arena_bytes: int, make: Callable[..., StoreCore] = StoreCore, **options: Any) -> StoreCore:
        pool = Pool(make_allocator(allocator_name))
        pools.append(pool)
        options = {"clock": clock, "watermarks": Watermarks(1.0, 1.0), "random": random.Random(1), **options}
        core = make(pool, **options)
        for index, length in enumerate(arena_bytes or (4096,)):
            core.add_arena(create_arena(index, length))
        return core

    yield create
    for pool in pools:
        pool.close()


@pytest.fixture
def core(make_core: Callable[..., StoreCore]) -> StoreCore:
    """A store of one arena of 4 KiB, with room for 64 blocks of a unit."""
    return make_core()


@pytest.fixture
def client(core: StoreCore) -> Client:
    return core.open_client("a")
