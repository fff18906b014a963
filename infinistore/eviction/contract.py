"""The contract of `Eviction` as a test suite, for any strategy.

With pytest, in a test file of the package that brings the strategy:

    from infinistore.eviction.contract import EvictionContract
    from some_package import Clock

    class TestClock(EvictionContract):
        eviction = Clock

It drives the strategy as a store does, in random sequences of calls that Hypothesis
makes. So this module needs Hypothesis (`pip install hypothesis`). Nothing else in
InfiniStore imports this module.
"""

import tracemalloc
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice, pairwise
from typing import Any, ClassVar

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from infinistore.allocators.contract import ContractViolation, require
from infinistore.eviction.base import Eviction
from infinistore.eviction.reuse import Reuse

__all__ = ["ContractViolation", "EvictionContract"]

_KEYS = [f"key {number}" for number in range(40)]
_BATCHES = st.lists(st.sampled_from(_KEYS), min_size=1, max_size=12, unique=True)
_LOOP_KEYS = 4096


class EvictionContract:
    """The tests that every strategy passes. Name the strategy in a subclass:
    `eviction`.
    """

    eviction: ClassVar[type[Eviction]]
    """The strategy."""

    settings: ClassVar[hypothesis.settings | None] = None
    """How much Hypothesis tries; None: as its profile says."""

    def test_it_has_a_name(self) -> None:
        """`--eviction` and the entry point name it."""
        name = getattr(self.eviction, "name", None)
        require(isinstance(name, str) and name != "", "a strategy has a name", repr(name))

    def test_calls_in_any_order_keep_the_contract(self) -> None:
        """Everything that the contract says of the order."""

        class Machine(_EvictionMachine):
            eviction = self.eviction

        run_state_machine_as_test(Machine, settings=self.settings)

    def test_it_keeps_little_for_each_key(self) -> None:
        """Whatever the strategy does with a loop longer than the pool, and with keys
        that are used again."""
        extra_bytes = _kept_bytes(self.eviction) - _kept_bytes(Eviction)
        require(
            extra_bytes <= 16 * _LOOP_KEYS,
            "a strategy keeps at most 16 bytes for each key",
            f"{extra_bytes / _LOOP_KEYS:.1f}",
        )


class _Store:
    """Keys and a strategy for them, as the index of a store has them."""

    def __init__(self, eviction: type[Eviction]) -> None:
        self.order: OrderedDict[str, Any] = OrderedDict()
        self.reuse = Reuse(self.order, lambda most: list(islice(self.order, most)))
        self.strategy = eviction(self.order, self.reuse)

    def insert(self, keys: Sequence[str], entry: object) -> None:
        """Put keys."""
        if self.reuse.pool_keys:
            self.reuse.put(keys)
        self.strategy.insert(keys, [entry] * len(keys))

    def touch(self, keys: Sequence[str]) -> None:
        """Use keys."""
        if not self.reuse.watched.keys().isdisjoint(keys):
            self.reuse.used(keys)
        self.strategy.touch(keys)

    def coldest(self, count: int) -> list[str]:
        """Return keys to evict."""
        self.reuse.evicting(1 << 20)
        return list(islice(self.order, count))


class _EvictionMachine(RuleBasedStateMachine):
    eviction: type[Eviction]

    @initialize()
    def start(self) -> None:
        self.stores = [_Store(self.eviction) for _ in range(2)]
        self.entries: dict[str, int] = {}
        self.puts = 0

    @rule(keys=_BATCHES)
    def put(self, keys: list[str]) -> None:
        new = [key for key in keys if key not in self.entries]
        self.puts += 1
        for store in self.stores:
            store.insert(keys, self.puts)
        self.entries.update(dict.fromkeys(keys, self.puts))
        self.heads_outlive_tails(new)
        if len(new) < len(keys):
            self.use(keys)

    @rule(keys=_BATCHES)
    def use(self, keys: list[str]) -> None:
        keys = [key for key in keys if key in self.entries]
        for store in self.stores:
            store.touch(keys)
        self.heads_outlive_tails(keys)

    @rule(keys=_BATCHES)
    def use_one(self, keys: list[str]) -> None:
        if keys[0] in self.entries:
            for store in self.stores:
                store.strategy.touch_one(keys[0])

    @rule(keys=_BATCHES)
    def use_twice_in_a_call(self, keys: list[str]) -> None:
        keys = [key for key in keys if key in self.entries]
        for store in self.stores:
            store.touch(keys + keys)

    @rule(count=st.integers(1, 12), pinned=st.sets(st.integers(0, 11), max_size=4))
    def evict(self, count: int, pinned: set[int]) -> None:
        for store in self.stores:
            keys = store.coldest(count)
            kept = [key for number, key in enumerate(keys) if number in pinned]
            store.strategy.pass_over(kept[::-1])
            require(
                list(islice(reversed(store.order), len(kept))) == kept[::-1],
                "what is passed over is the warmest",
                f"{list(store.order)} after {kept}",
            )
            for key in keys:
                if key not in kept:
                    del store.order[key]
                    self.entries.pop(key, None)

    @rule(keys=_BATCHES)
    def delete(self, keys: list[str]) -> None:
        for store in self.stores:
            for key in keys:
                store.order.pop(key, None)
        for key in keys:
            self.entries.pop(key, None)

    @invariant()
    def keys_come_and_go_by_insertion_and_removal_alone(self) -> None:
        for store in self.stores:
            require(
                dict(store.order) == self.entries,
                "the order has the keys that were put and not removed, each with its last entry",
                f"{dict(store.order)} instead of {self.entries}",
            )

    @invariant()
    def the_same_calls_lead_to_the_same_order(self) -> None:
        one, other = self.stores
        require(list(one.order) == list(other.order), "the same calls lead to the same order")

    def heads_outlive_tails(self, keys: Sequence[str]) -> None:
        for store in self.stores:
            place = {key: number for number, key in enumerate(store.order)}
            require(
                all(place.get(head, -1) > place.get(tail, -1) for head, tail in pairwise(keys)),
                "of the keys of a call, each is warmer than those after it",
                f"{list(store.order)} after {list(keys)}",
            )


def _kept_bytes(eviction: type[Eviction]) -> int:
    """Return the most bytes that a store with a strategy has between two calls."""
    loop = [f"loop {number}" for number in range(_LOOP_KEYS * 5 // 4)]
    batches = [loop[first : first + 64] for first in range(0, len(loop), 64)]
    most_bytes = 0
    tracemalloc.start()
    try:
        store = _Store(eviction)
        for keys in batches * 4:
            there = [key for key in keys if key in store.order]
            store.touch(there)
            new = [key for key in keys if key not in store.order]
            for key in store.coldest(excess) if (excess := len(store.order) + len(new) - _LOOP_KEYS) > 0 else ():
                del store.order[key]
            new = [key for key in keys if key not in store.order]
            store.insert(new, None)
            most_bytes = max(most_bytes, tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    return most_bytes
