"""The strategy of eviction that a store is opened with."""

from typing import Any

import pytest

from infinistore.allocators import create_allocator
from infinistore.blocking import open_store
from infinistore.core import Pool, StoreCore
from infinistore.errors import ConfigError
from infinistore.eviction.adaptive import Adaptive
from infinistore.server.composition import make_core
from infinistore.server.environment import Environment
from tests.server.running import make_config

BLOCK = bytes(64 * 1024)


@pytest.mark.parametrize(("eviction", "least_hits"), [("lru", 0), ("adaptive", 100)])
def test_prompts_in_turns_that_are_more_than_the_pool(eviction: str, least_hits: int) -> None:
    """19 prompts of 16 blocks in a pool of 256 blocks, of which the watermarks leave
    205 to 243: at best, 14 of 18 prompts are there.
    """
    with open_store(pool_bytes=256 * len(BLOCK), minimal_allocate_bytes=len(BLOCK), eviction=eviction) as store:
        hits = 0
        for _ in range(16):
            hits = 0
            for number in range(19):
                keys = [f"{number}/{block}" for block in range(16)]
                found = store.match_prefix(keys)
                store.put_many([(key, BLOCK) for key in keys[found:]])
                hits += found
        assert hits >= least_hits
        assert (hits > 0) == (least_hits > 0)


def test_a_strategy_that_nobody_brings_is_refused() -> None:
    with pytest.raises(ConfigError, match="no eviction strategy called 'lfu'"), open_store(eviction="lfu"):
        pass


def test_a_server_makes_its_store_with_the_strategy_of_its_configuration() -> None:
    given: dict[str, Any] = {}

    def make_store(pool: Pool, **options: Any) -> StoreCore:
        given.update(options)
        return StoreCore(pool, **options)

    pool = Pool(create_allocator("bitmap", 1024))
    make_core(make_config(eviction="adaptive"), pool, Environment(make_store=make_store))
    assert given["eviction"] is Adaptive
