"""When the adaptive strategy lets new keys pass through, and what that is worth."""

import random
import weakref

import pytest

from infinistore.core.index import Index
from infinistore.eviction.adaptive import Adaptive
from infinistore.eviction.base import LeastRecentlyUsed
from tests.eviction.pools import SmallPool, prompt, turns
from tests.eviction.strategies import Passing


@pytest.mark.parametrize("prompts", [70, 77, 90, 130, 250])
def test_a_loop_longer_than_the_pool_is_served_in_part(prompts: int) -> None:
    """At least 0.7 of what the best strategy would have: the pool, less a block of each
    prompt, of each round."""
    pool = SmallPool(Adaptive, 64 * 16)
    pool.ask_all(turns(prompts, 20))
    assert pool.ask_all(turns(prompts, 5)) >= 5 * 0.7 * 64 * 16
    lru = SmallPool(LeastRecentlyUsed, 64 * 16)
    assert lru.ask_all(turns(prompts, 5)) == 0


def test_a_loop_that_fits_is_served_in_full() -> None:
    pool = SmallPool(Adaptive, 64 * 16)
    pool.ask_all(turns(64, 1))
    assert pool.ask_all(turns(64, 10)) == 10 * 64 * 16


def test_prompts_that_grow_are_served_as_by_recency() -> None:
    """Conversations, each of which goes on a few times and ends."""
    chance = random.Random(5)
    talks: list[list[str]] = []
    asked = []
    for number in range(2000):
        if len(talks) < 40:
            talks.append(prompt(number))
        talk = chance.randrange(len(talks))
        talks[talk] = talks[talk] + prompt(f"{number} goes on", 4)
        asked.append(talks[talk])
        if chance.random() < 0.2:
            talks.pop(talk)
    for blocks in (256, 512, 1024):
        assert SmallPool(Adaptive, blocks).ask_all(asked) >= 0.99 * SmallPool(LeastRecentlyUsed, blocks).ask_all(asked)


def test_it_goes_back_to_recency_when_the_loop_has_ended() -> None:
    pool = SmallPool(Adaptive, 64 * 16)
    pool.ask_all(turns(77, 20))
    twice = [prompt(f"new {number // 40 * 20 + number % 20}") for number in range(4000)]  # 20 prompts, and again
    pool.ask_all(twice[:2000])
    lru = SmallPool(LeastRecentlyUsed, 64 * 16)
    lru.ask_all(twice[:2000])
    assert pool.ask_all(twice[2000:]) >= 0.99 * lru.ask_all(twice[2000:])


def test_it_goes_back_to_recency_when_the_pool_has_been_emptied() -> None:
    pool = SmallPool(Adaptive, 64 * 16)
    pool.ask_all(turns(77, 20))
    pool.index.remove(list(pool.index))
    pool.ask_all(turns(64, 12))  # nothing is evicted for these
    for name in "abc":
        pool.ask(prompt(name))
    pool.ask_all(prompt(f"other {number}") for number in range(60))
    assert [pool.ask(prompt(name)) for name in "abc"] == [16] * 3


@pytest.fixture
def passing() -> SmallPool:
    """A pool of 64 prompts in which new ones pass through."""
    pool = SmallPool(Passing, 64 * 16)
    pool.ask_all(turns(65, 1))
    return pool


def test_what_passes_through_stays_for_an_eighth_of_the_pool(passing: SmallPool) -> None:
    passing.ask(prompt("new"))
    passing.ask(prompt("next"))
    assert passing.ask(prompt("new")) == 16
    for number in range(9):
        passing.ask(prompt(f"later {number}"))
    assert passing.index.leading(prompt("new")) == []


def test_a_use_at_once_does_not_let_a_key_stay_and_a_later_one_does(passing: SmallPool) -> None:
    passing.ask(prompt("at once"))
    passing.ask(prompt("at once"))
    passing.ask(prompt("later"))
    passing.ask_all(prompt(f"between {number}") for number in range(5))
    passing.ask(prompt("later"))
    for number in range(80):
        passing.ask(prompt(f"other {number}"))
    assert passing.index.leading(prompt("at once")) == []
    assert passing.index.leading(prompt("later")) == prompt("later")


def test_the_tail_of_what_passes_through_goes_first(passing: SmallPool) -> None:
    for number in range(9):
        passing.ask(prompt(f"new {number}"))
    assert passing.index.coldest(4) == prompt("new 0")[:11:-1]


def test_a_key_that_was_deleted_in_the_window_is_no_trouble(passing: SmallPool) -> None:
    index: Index = passing.index
    passing.ask(prompt("new"))
    index.remove(prompt("new"))
    passing.ask(prompt("new"))
    for number in range(20):
        passing.ask(prompt(f"other {number}"))
    assert len(index) == 64 * 16


class Key(str):
    """One that can be watched until nobody has it."""


def test_keys_that_have_left_the_pool_are_not_kept(passing: SmallPool) -> None:
    """All are used a second time, so that they leave the window before it is full. The
    samples have 12 pools of this size."""
    there: weakref.WeakSet[Key] = weakref.WeakSet()
    asked: list[list[str]] = []
    for number in range(2000):
        made = [Key(name) for name in prompt(f"new {number}")]
        there.update(made)
        passing.ask(made)
        asked.append(list(made))
        del made
        if len(asked) > 6:
            passing.ask(asked.pop(0))
    assert len(there) < 16 * passing.blocks < 2000 * 16


def test_a_key_that_is_deleted_and_put_again_and_again_is_kept_once(passing: SmallPool) -> None:
    there: weakref.WeakSet[Key] = weakref.WeakSet()
    for _ in range(2000):
        passing.index.remove(["again"])
        key = Key("again")
        there.add(key)
        passing.ask([key])
        del key
    assert len(there) < 100
