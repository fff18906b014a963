"""The strategies keep the contract of `Eviction`, and the suite finds those that do
not.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any, ClassVar

import pytest
from hypothesis import Phase, settings

from examples.cold_first_eviction import ColdFirst
from infinistore.eviction import Eviction, Reuse, eviction_class
from infinistore.eviction.adaptive import Adaptive
from infinistore.eviction.contract import ContractViolation, EvictionContract
from tests.eviction.strategies import Passing
from tests.examples import examples

SETTINGS = settings(max_examples=examples(30), stateful_step_count=30)


class OurContract(EvictionContract):
    settings = SETTINGS


class TestLeastRecentlyUsed(OurContract):
    eviction = eviction_class("lru")


class TestAdaptive(OurContract):
    eviction = eviction_class("adaptive")


class TestAdaptiveWhileNewKeysPass(OurContract):
    eviction = Passing


class TestColdFirst(OurContract):
    eviction = ColdFirst


class NoName(Eviction):
    pass


class TailsFirst(Eviction):
    name: ClassVar[str] = "tails-first"

    def touch(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.order.move_to_end(key)


class InsertsTailsFirst(Eviction):
    name: ClassVar[str] = "inserts-tails-first"

    def insert(self, keys: Sequence[str], entries: Sequence[Any]) -> None:
        self.order.update(zip(keys, entries, strict=True))


class Forgets(Eviction):
    name: ClassVar[str] = "forgets"

    def touch(self, keys: Sequence[str]) -> None:
        super().touch(keys)
        if len(keys) > 3:
            del self.order[keys[-1]]


class KeepsOldEntries(Eviction):
    name: ClassVar[str] = "keeps-old-entries"

    def insert(self, keys: Sequence[str], entries: Sequence[Any]) -> None:
        for key, entry in zip(reversed(keys), reversed(entries), strict=True):
            self.order.setdefault(key, entry)


class LeavesPinned(Eviction):
    name: ClassVar[str] = "leaves-pinned"

    def pass_over(self, keys: Sequence[str]) -> None:
        pass


class OneOfTwo(ColdFirst):
    """Every other store has another order."""

    name: ClassVar[str] = "one-of-two"
    others: ClassVar[Iterator[type[Eviction]]] = cycle([ColdFirst, Eviction])

    def __init__(self, order: OrderedDict[str, Any], reuse: Reuse) -> None:
        super().__init__(order, reuse)
        self.other = next(self.others)

    def insert(self, keys: Sequence[str], entries: Sequence[Any]) -> None:
        self.other.insert(self, keys, entries)


class KeepsMuch(Adaptive):
    name: ClassVar[str] = "keeps-much"

    def insert(self, keys: Sequence[str], entries: Sequence[Any]) -> None:
        super().insert(keys, entries)
        self.__dict__.setdefault("kept", {}).update(dict.fromkeys(keys))


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        (TailsFirst, "each is warmer than those after it"),
        (InsertsTailsFirst, "each is warmer than those after it"),
        (Forgets, "put and not removed|warmer than"),
        (KeepsOldEntries, "each with its last entry"),
        (LeavesPinned, "what is passed over is the warmest"),
        (OneOfTwo, "the same calls lead to the same order"),
    ],
)
def test_a_wrong_strategy_is_found(wrong: type[Eviction], rule: str) -> None:
    found = settings(SETTINGS, phases=[Phase.generate], derandomize=True, database=None, report_multiple_bugs=False)
    suite = type("Suite", (EvictionContract,), {"eviction": wrong, "settings": found})
    with pytest.raises(ContractViolation, match=rule):
        suite().test_calls_in_any_order_keep_the_contract()


def test_a_strategy_that_keeps_too_much_is_found() -> None:
    suite = type("Suite", (EvictionContract,), {"eviction": KeepsMuch})
    with pytest.raises(ContractViolation, match="at most 16 bytes for each key"):
        suite().test_it_keeps_little_for_each_key()


def test_a_strategy_without_a_name_is_found() -> None:
    suite = type("Suite", (EvictionContract,), {"eviction": NoName})
    with pytest.raises(ContractViolation, match="a strategy has a name"):
        suite().test_it_has_a_name()
