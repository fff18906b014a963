"""The figures of `Reuse` beside exact ones."""

import random
from collections import OrderedDict
from collections.abc import Iterable

import pytest

from infinistore.core import Pool, StoreCore, Watermarks, create_arena
from infinistore.eviction.base import LeastRecentlyUsed
from infinistore.eviction.reuse import PARTS, Reuse, WantedPool
from tests.core.conftest import make_allocator
from tests.core.test_store import put
from tests.eviction.pools import SmallPool, prompt, turns


def exact_misses(asked: list[list[str]], blocks: int) -> int:
    """How many blocks are put again with least recently used first."""
    stack: OrderedDict[str, None] = OrderedDict()
    seen: set[str] = set()
    count = 0
    for keys in asked:
        new = [key for key in keys if key not in stack]
        count += len(seen.intersection(new))
        for key in reversed(keys):
            stack[key] = None
            stack.move_to_end(key)
        while len(stack) > blocks:
            stack.popitem(last=False)
        seen.update(keys)
    return count


def test_it_tells_what_larger_pools_would_have_had() -> None:
    """Prompts of different popularity: within a fifth of the exact figures."""
    chance = random.Random(2)
    popular = [1 / (number + 1) ** 0.8 for number in range(1500)]
    asked = [prompt(number) for number in chance.choices(range(1500), popular, k=20_000)]
    pool = SmallPool(LeastRecentlyUsed, 4096)
    reuse = pool.index.reuse
    found = [0.0] * len(reuse.asked_again)
    before = list(found)

    def add() -> bool:
        found[:] = [sum(counts) for counts in zip(found, reuse.asked_again, strict=True)]
        found[:] = [count - old for count, old in zip(found, before, strict=True)]
        before[:] = [count / 2 for count in reuse.asked_again]  # what is left of them in the next turn
        return False

    reuse.on_turn = add
    pool.ask_all(asked)
    misses = exact_misses(asked, 4096)
    assert sum(found) == pytest.approx(misses, rel=0.2)
    for size in (2, 3, 4):
        assert sum(found[: size * PARTS]) == pytest.approx(misses - exact_misses(asked, 4096 * size), rel=0.2)


def test_a_loop_is_at_the_distance_that_it_has() -> None:
    pool = SmallPool(LeastRecentlyUsed, 64 * 16)
    pool.ask_all(turns(96, 30))  # one and a half pools
    again = pool.index.reuse.asked_again
    assert sum(again[11:13]) >= 0.95 * sum(again) > 0


@pytest.mark.parametrize("prompts", [80, 96, 180, 300])
def test_a_loop_wants_a_pool_that_has_all_of_it(prompts: int) -> None:
    pool = SmallPool(LeastRecentlyUsed, 64 * 16)
    told: list[WantedPool] = []
    pool.index.reuse.on_wanted = told.append
    pool.ask_all(turns(prompts, 30))
    wanted = pool.index.reuse.wanted
    assert wanted == told[-1]
    assert prompts / 64 <= wanted.pools <= prompts / 64 + 0.25
    assert wanted.avoidable > 0.8


@pytest.mark.parametrize("asked", [turns(4000, 1), turns(64, 30), turns(600, 10)], ids=["new", "fits", "too large"])
def test_no_pool_is_wanted_that_would_be_no_better(asked: Iterable[list[str]]) -> None:
    pool = SmallPool(LeastRecentlyUsed, 64 * 16)
    pool.ask_all(asked)
    assert pool.index.reuse.wanted == WantedPool()


def test_a_few_keys_of_a_small_pool_tell_nothing() -> None:
    pool = SmallPool(LeastRecentlyUsed, 4)
    for _ in range(7):
        pool.ask_all(turns(5, 1, blocks=1))
    assert sum(pool.index.reuse.asked_again) > 0
    assert pool.index.reuse.wanted == WantedPool()


def test_the_wanted_pool_has_what_it_was_said_to_have() -> None:
    chance = random.Random(3)
    popular = [1 / (number + 1) ** 0.8 for number in range(1500)]
    asked = [prompt(number) for number in chance.choices(range(1500), popular, k=20_000)]
    pool = SmallPool(LeastRecentlyUsed, 4096)
    pool.ask_all(asked)
    wanted = pool.index.reuse.wanted
    # Of the last turns, as in the figures, by when most blocks were put before.
    now, then = (SmallPool(LeastRecentlyUsed, round(pools * 4096)) for pools in (1, wanted.pools))
    for one in (now, then):
        one.ask_all(asked[:16_000])
    last = asked[16_000:]
    puts, puts_then = (sum(map(len, last)) - one.ask_all(last) for one in (now, then))
    assert 0.3 < wanted.avoidable == pytest.approx((puts - puts_then) / puts, abs=0.1)


def test_a_pool_that_does_not_evict_is_not_watched() -> None:
    pool = SmallPool(LeastRecentlyUsed, 64 * 16)
    pool.ask_all(turns(64, 3))
    reuse = pool.index.reuse
    assert (reuse.watched, reuse.pool_keys) == ({}, 0)
    pool.ask(prompt("one more"))
    assert reuse.watched
    pool.index.remove(list(pool.index)[:512])
    for number in range(1000):
        pool.ask(prompt(number % 8))
    assert (reuse.watched, reuse.pool_keys) == ({}, 0)


def test_two_uses_shortly_after_one_another_are_one() -> None:
    pool = SmallPool(LeastRecentlyUsed, 64 * 16)
    pool.ask_all(turns(65, 2))
    before = pool.index.reuse.position
    for _ in range(50):
        pool.ask(prompt(64))
    assert pool.index.reuse.position - before <= 16 * pool.index.reuse.step


def test_what_was_deleted_and_put_again_was_not_evicted() -> None:
    core = StoreCore(
        Pool(make_allocator("bitmap")), clock=lambda: 0.0, watermarks=Watermarks(1.0, 1.0), eviction=LeastRecentlyUsed
    )
    core.add_arena(create_arena(0, 64 * 1024))
    client = core.open_client("me")
    for number in range(70):
        put(core, client, dict.fromkeys(prompt(number), b"x"))
    for _ in range(100):
        core.delete(prompt(69))
        put(core, client, dict.fromkeys(prompt(69), b"x"))
    assert sum(core.index.reuse.asked_again) == 0
    core.pool.close()


def test_the_sample_is_small() -> None:
    pool = SmallPool(LeastRecentlyUsed, 40_000)
    for number in range(8000):
        pool.ask(prompt(number))
    assert 300 < len(pool.index.reuse.watched) < 8192


def test_an_empty_store_can_be_asked_to_evict() -> None:
    order: OrderedDict[str, None] = OrderedDict()
    reuse = Reuse(order, lambda most: [])
    reuse.evicting(1)
    assert reuse.pool_keys == 0
