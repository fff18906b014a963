"""Work in slices: what others do between two of them."""

import time
from collections.abc import Callable, Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from infinistore.allocators import create_allocator
from infinistore.answers import ANSWERS
from infinistore.core import Pool, StoreCore, create_arena
from infinistore.core.limits import CoreLimits
from infinistore.core.tenants import Tenants
from infinistore.disk.tiers import Tiers
from infinistore.protocol.messages import KeysReply, ListKeys
from infinistore.server.disk import settle
from infinistore.server.tenancy import WholeStore
from infinistore.tenant_limits import TenantLimits

OLD, NEW = 10_000, 100  # three slices, so that one is left, whoever runs first
LIMITS = CoreLimits(max_batch_keys=OLD)


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool(create_allocator("bitmap", 64))
    pool.add_arena(create_arena(0, 2 * OLD * 64))
    yield pool
    pool.close()


def one_store(pool: Pool) -> tuple[StoreCore, StoreCore]:
    core = StoreCore(pool, clock=time.monotonic, limits=LIMITS)
    return core, core


def of_tenants(pool: Pool) -> tuple[StoreCore, StoreCore]:
    tenants = Tenants(pool, clock=time.monotonic, limits=LIMITS)
    tenants.apply([TenantLimits("ann"), TenantLimits("ben")])
    return WholeStore([tenants], clock=time.monotonic), tenants.store("ben")


def put(core: StoreCore, keys: list[str]) -> None:
    client = core.open_client("writer")
    core.commit(core.reserve(client, [64] * len(keys)), keys, [0] * len(keys))
    core.close_client(client)


@pytest.mark.parametrize("make", [one_store, of_tenants])
async def test_a_purge_takes_what_was_there_also_if_others_put_and_read_keys_meanwhile(
    pool: Pool, make: Callable[[Pool], tuple[StoreCore, StoreCore]]
) -> None:
    purged, core = make(pool)
    old = [f"old {number}" for number in range(OLD)]
    put(core, old)

    async def disturb() -> None:
        while len(core) == OLD:
            await trio.lowlevel.checkpoint()
        assert len(core) > NEW
        put(core, [f"new {number}" for number in range(NEW)])
        core.touch(old)  # so that the new keys are the coldest

    async with trio.open_nursery() as nursery:
        nursery.start_soon(disturb)
        assert await settle(Tiers(purged).purge(60.0)) == OLD
    assert sorted(core.all_keys()) == sorted(f"new {number}" for number in range(NEW))


class CountedKey(str):
    """A key that counts how often any is compared."""

    compared = 0

    def __lt__(self, other: str) -> bool:
        CountedKey.compared += 1
        return str.__lt__(self, other)


async def test_a_long_page_takes_few_comparisons_for_each_key() -> None:
    """That of an embedded store, which has no limit of its own."""
    keys = [CountedKey(f"{number:06}") for number in range(40_000)]
    Random(1).shuffle(keys)
    core = SimpleNamespace(all_keys=lambda: list(keys), limits=CoreLimits(max_page_keys=len(keys)))
    tiers, client, limit = SimpleNamespace(core=core), SimpleNamespace(), 30_000
    CountedKey.compared = 0
    answer: Any = ANSWERS[ListKeys]
    reply = await settle(answer(ListKeys(limit=limit), tiers, client, 60.0))
    assert CountedKey.compared < 20 * len(keys)
    assert isinstance(reply, KeysReply)
    assert reply.keys == sorted(map(str, keys))[:limit]
