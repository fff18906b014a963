"""The contract suite finds every kind of wrong allocator: a suite that cannot fail is
worth nothing.

Each class here is the example with one mistake. The message has to name the rule that
the mistake breaks.
"""

import ast
import inspect
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import pytest
from hypothesis import Phase, settings

from examples.first_fit_allocator import FirstFitAllocator
from infinistore.allocators import Allocator, AllocatorStatistics, Extent, contract
from infinistore.allocators.contract import UNIT, AllocatorContract, ContractViolation, broken_rules

ANY_ORDER = "test_calls_in_any_order_agree_with_a_model"
IN_ONE_PIECE = "test_a_batch_in_an_empty_pool_lies_in_one_piece"
REFILL = "test_a_pool_can_be_filled_emptied_and_filled_with_another_size"
ARENAS = "test_arenas_come_in_turn_and_are_not_of_negative_length"
FOOTPRINT = "test_a_footprint_is_whole_units_and_holds_the_block"
BEFORE = "test_nothing_can_be_placed_before_the_first_arena"
SHORT = "test_an_arena_shorter_than_a_unit_holds_nothing"
UNITS = "test_a_unit_is_a_multiple_of_a_cache_line"
NAME = "test_it_has_a_name_and_says_it"
SEQUENCES = "test_sizes_may_be_any_sequence_and_extents_any_iterable"


@attrs.frozen
class Expected:
    """A wrong allocator, the test that finds it, the rule that this names, and
    attributes of the contract.
    """

    allocator: type[Allocator]
    test: str
    rule: str
    options: Mapping[str, object]


wrong_allocators: list[Expected] = []


def wrong(test: str, rule: str, **options: object) -> Callable[[type[Allocator]], type[Allocator]]:
    """Note what an allocator is found for."""

    def note(made: type[Allocator]) -> type[Allocator]:
        wrong_allocators.append(Expected(made, test, rule, options))
        return made

    return note


@wrong(ANY_ORDER, "an extent overlaps no other")
class Overlapping(FirstFitAllocator):
    """Of a batch of two, the second lies where the first does."""

    def allocate(self, sizes: Sequence[int]) -> list[Extent] | None:
        extents = super().allocate(sizes)
        if extents is not None and len(extents) == 2:
            self.free(extents[1:])
            extents[1] = (*extents[0][:2], extents[1][2])
        return extents


@wrong(ANY_ORDER, "an extent ends within its arena")
class BeyondTheEnd(FirstFitAllocator):
    """The last block of a batch that does not fit lies where the first arena
    has ended.
    """

    def allocate(self, sizes: Sequence[int]) -> list[Extent] | None:
        extents = super().allocate(sizes)
        if extents is None and len(set(sizes)) > 1 and (head := super().allocate(sizes[:-1])) is not None:
            return [*head, (0, self._arena_bytes[0] // UNIT * UNIT, sizes[-1])]
        return extents


@wrong(ANY_ORDER, "an extent starts at a multiple of the unit")
class Unaligned(FirstFitAllocator):
    """Blocks of three units start a byte later."""

    def allocate(self, sizes: Sequence[int]) -> list[Extent] | None:
        extents = super().allocate(sizes)
        return extents and [(arena, offset + (length == 3 * UNIT), length) for arena, offset, length in extents]


@wrong(ANY_ORDER, "an extent lies in an arena that was added")
class InNoArena(FirstFitAllocator):
    """Blocks of three units lie in the arena after the last."""

    def allocate(self, sizes: Sequence[int]) -> list[Extent] | None:
        extents = super().allocate(sizes)
        return extents and [
            (arena + len(self._free) * (length == 3 * UNIT), offset, length) for arena, offset, length in extents
        ]


@wrong(ANY_ORDER, "one extent for each size, in order")
class WrongLength(FirstFitAllocator):
    """An extent has the length of its footprint instead of the block's."""

    def allocate(self, sizes: Sequence[int]) -> list[Extent] | None:
        extents = super().allocate(sizes)
        return extents and [(arena, offset, self.footprint(length)) for arena, offset, length in extents]


@wrong(ANY_ORDER, "one extent for each size, in order")
class OutOfOrder(FirstFitAllocator):
    """The largest blocks come first."""

    def allocate(self, sizes: Sequence[int]) -> list[Extent] | None:
        return super().allocate(sorted(sizes, reverse=True))


@wrong(ANY_ORDER, "one extent for each size, in order")
class TooFew(FirstFitAllocator):
    """A batch that does not fit is placed as far as it does."""

    def allocate(self, sizes: Sequence[int]) -> list[Extent] | None:
        if super().allocate([]) is None:
            return None
        extents: list[Extent] = []
        for size in sizes:
            one = super().allocate([size])
            if one is None:
                return extents or None
            extents += one
        return extents


class Place(tuple[int, int, int]):
    """An extent of another type."""


@wrong(ANY_ORDER, "an extent is an exact tuple")
class OtherType(FirstFitAllocator):
    """Extents are objects of a class."""

    def allocate(self, sizes: Sequence[int]) -> list[Extent] | None:
        extents = super().allocate(sizes)
        return extents and list(map(Place, extents))


@wrong(ANY_ORDER, "a batch that is refused changes nothing")
class KeepsHalfABatch(FirstFitAllocator):
    """A batch that does not fit leaves behind what did."""

    def allocate(self, sizes: Sequence[int]) -> list[Extent] | None:
        if any(size <= 0 for size in sizes):
            raise ValueError("a block must have at least one byte")
        extents = [self._place(size) for size in sizes]
        return None if None in extents else [extent for extent in extents if extent is not None]


@wrong(ANY_ORDER, "a block that fits is placed")
class Timid(FirstFitAllocator):
    """Blocks of an odd size that come alone are refused."""

    def allocate(self, sizes: Sequence[int]) -> list[Extent] | None:
        return None if len(sizes) == 1 and sizes[0] > 0 and sizes[0] % 2 else super().allocate(sizes)


@wrong(ANY_ORDER, "when everything is freed, all of the capacity can be allocated again")
class Leaking(FirstFitAllocator):
    """Blocks of three units are counted as free, but their space is lost."""

    def free(self, extents: Iterable[Extent]) -> None:
        extents = list(extents)
        super().free(extents)
        for arena, offset, length in extents:
            if length == 3 * UNIT:
                lost = [(start, end) for start, end in self._free[arena] if start <= offset < end]
                self._free[arena].remove(lost[0])


@wrong(ANY_ORDER, "an extent that was freed before is refused")
class ForgivesAnOldExtent(FirstFitAllocator):
    """An extent that was the last to be freed may be freed again."""

    last: Extent | None = None

    def free(self, extents: Iterable[Extent]) -> None:
        extents = list(extents)
        if extents != [self.last]:
            super().free(extents)
            self.last = extents[0] if extents else None


@wrong(ANY_ORDER, "an extent that is freed twice in one call is refused")
class ForgivesTwice(FirstFitAllocator):
    """An extent that is named twice in one call is freed once."""

    def free(self, extents: Iterable[Extent]) -> None:
        super().free(list(dict.fromkeys(extents)))


@wrong(ANY_ORDER, "an extent that was never given out is refused")
class BelievesTheLength(FirstFitAllocator):
    """Only the place of an extent is checked."""

    def free(self, extents: Iterable[Extent]) -> None:
        extents = list(extents)
        if not all((arena, offset) in self._taken for arena, offset, _ in extents):
            raise ValueError("not allocated")
        super().free([(arena, offset, self._taken[arena, offset]) for arena, offset, _ in extents])


@wrong(ANY_ORDER, "a free that is refused changes nothing")
class FreesHalf(FirstFitAllocator):
    """What is allocated is freed before the rest is refused."""

    def free(self, extents: Iterable[Extent]) -> None:
        for extent in list(extents):
            super().free([extent])


@wrong(ANY_ORDER, "a size of zero or less is refused")
class PlacesNothing(FirstFitAllocator):
    """A size of zero or less counts as one byte."""

    def allocate(self, sizes: Sequence[int]) -> list[Extent] | None:
        return super().allocate([max(1, size) for size in sizes])


@wrong(ANY_ORDER, "more than the pool has is refused")
class Promising(FirstFitAllocator):
    """What is larger than the pool is placed at its beginning."""

    def allocate(self, sizes: Sequence[int]) -> list[Extent] | None:
        return [(0, 0, sizes[0])] if list(sizes) == [1 << 62] else super().allocate(sizes)


@wrong(ANY_ORDER, "the capacity is what blocks can take")
class CountsTails(FirstFitAllocator):
    """The capacity counts what is too short for a unit."""

    def statistics(self) -> AllocatorStatistics:
        return attrs.evolve(super().statistics(), capacity_bytes=sum(self._arena_bytes))


@wrong(ANY_ORDER, "as many parts are told as were asked for")
class OnePart(FirstFitAllocator):
    """It knows only the whole."""

    def occupied_bytes(self, index: int, parts: int) -> list[int]:
        return [sum(length for (arena, _), length in self._taken.items() if arena == index)]


@wrong(ANY_ORDER, "what is occupied is what is used")
class OccupiesMore(FirstFitAllocator):
    """Each part has a byte more."""

    def occupied_bytes(self, index: int, parts: int) -> list[int]:
        return [1] * parts


@wrong(ANY_ORDER, "the parts have together what is used")
class LosesParts(FirstFitAllocator):
    """What lies in parts but the first is not told."""

    def occupied_bytes(self, index: int, parts: int) -> list[int]:
        used = sum(length for (arena, _), length in self._taken.items() if arena == index)
        return [used // parts] + [0] * (parts - 1)


@wrong(BEFORE, "before the first arena every batch is refused")
class NeedsNoArena(FirstFitAllocator):
    """It places blocks where nothing is."""

    def allocate(self, sizes: Sequence[int]) -> list[Extent] | None:
        return super().allocate(sizes) if self._free else [(0, 0, size) for size in sizes]


@wrong(BEFORE, "an empty batch has no extents")
class RefusesNothing(FirstFitAllocator):
    """An empty batch is refused."""

    def allocate(self, sizes: Sequence[int]) -> list[Extent] | None:
        return super().allocate(sizes) if sizes else None


@wrong(SHORT, "an arena shorter than a unit holds nothing")
class UsesTails(FirstFitAllocator):
    """Arenas are rounded up to whole units."""

    def add_arena(self, index: int, length: int) -> None:
        super().add_arena(index, -(-length // self.unit_bytes) * self.unit_bytes)


@wrong(ARENAS, "arena 1 of 64 bytes, of 0 arenas, is refused")
class TakesAnyArena(FirstFitAllocator):
    """Arenas may come in any order."""

    def add_arena(self, index: int, length: int) -> None:
        super().add_arena(len(self._free), max(0, length))


@wrong(UNITS, "a unit of -64 bytes is refused")
class TakesAnyUnit(FirstFitAllocator):
    """Any unit will do."""

    def __init__(self, unit_bytes: int) -> None:
        super().__init__(UNIT)
        self.unit_bytes = unit_bytes


@wrong(FOOTPRINT, "a footprint is a multiple of the unit")
class OddFootprint(FirstFitAllocator):
    """A block takes what it has."""

    def footprint(self, size: int) -> int:
        return size


@wrong(FOOTPRINT, "a footprint holds its block")
class SmallFootprint(FirstFitAllocator):
    """A footprint is rounded down."""

    def footprint(self, size: int) -> int:
        return max(1, size // self.unit_bytes) * self.unit_bytes


@wrong(IN_ONE_PIECE, "a batch in an empty pool lies in one piece")
class Scattering(FirstFitAllocator):
    """A batch is placed in a random order."""

    def allocate(self, sizes: Sequence[int]) -> list[Extent] | None:
        order = random.Random(1).sample(range(len(sizes)), len(sizes))
        extents = super().allocate([sizes[index] for index in order])
        return extents and [extent for _, extent in sorted(zip(order, extents, strict=True))]


@wrong(REFILL, "a pool can be filled with blocks of one size")
class Wasteful(FirstFitAllocator):
    """A tenth of the first arena is never used."""

    def add_arena(self, index: int, length: int) -> None:
        super().add_arena(index, length * 9 // 10)


@wrong(SEQUENCES, "list")
class WantsLists(FirstFitAllocator):
    """Extents must be a list."""

    def free(self, extents: Iterable[Extent]) -> None:
        if not isinstance(extents, list):
            raise TypeError("extents must be a list")
        super().free(extents)


@wrong(NAME, "a strategy has a name")
class NoName(FirstFitAllocator):
    """It goes by none."""

    name = ""


@wrong(SHORT, "a block is placed in the arena that has space")
class UsesTheFirstArena(FirstFitAllocator):
    """It uses no other arena than the first."""

    def add_arena(self, index: int, length: int) -> None:
        super().add_arena(index, 0 if index else length)


@wrong(ARENAS, "an arena that is refused is not added")
class CountsRefusedArenas(FirstFitAllocator):
    """It counts an arena before it looks at it."""

    calls = 0

    def add_arena(self, index: int, length: int) -> None:
        self.calls += 1
        super().add_arena(index, length)

    def statistics(self) -> AllocatorStatistics:
        return attrs.evolve(super().statistics(), arenas=self.calls)


@wrong(IN_ONE_PIECE, "a batch that fits into an empty pool is placed")
class RefusesLongBatches(FirstFitAllocator):
    """A batch has at most 10 blocks."""

    def allocate(self, sizes: Sequence[int]) -> list[Extent] | None:
        return super().allocate(sizes) if len(sizes) <= 10 else None


@wrong(SEQUENCES, "sizes may be a tuple")
class RefusesTuples(FirstFitAllocator):
    """Sizes must be a list."""

    def allocate(self, sizes: Sequence[int]) -> list[Extent] | None:
        return super().allocate(sizes) if isinstance(sizes, list) else None


@wrong(SEQUENCES, "extents may be an iterator")
class ReadsExtentsTwice(FirstFitAllocator):
    """An iterator is used up before its extents are freed."""

    def free(self, extents: Iterable[Extent]) -> None:
        if all(len(extent) == 3 for extent in extents):
            super().free(extents)


@wrong(ANY_ORDER, "a block as large as the largest free extent is placed", any_smaller_block_fits=False)
class RefusesLargeBlocks(FirstFitAllocator):
    """A block that comes alone has at most 20 units."""

    def allocate(self, sizes: Sequence[int]) -> list[Extent] | None:
        return None if len(sizes) == 1 and sizes[0] > 20 * UNIT else super().allocate(sizes)


@wrong(ANY_ORDER, "a batch that fits into one free run is placed", uses_any_free_run=True)
class RefusesPairs(FirstFitAllocator):
    """A batch of two is refused."""

    def allocate(self, sizes: Sequence[int]) -> list[Extent] | None:
        return None if len(sizes) == 2 and min(sizes) > 0 else super().allocate(sizes)


@wrong(ANY_ORDER, "a size of zero or less is refused with a message that says so", refused_size="at least one byte")
class OtherWords(FirstFitAllocator):
    """The message is not the one that was promised."""

    def allocate(self, sizes: Sequence[int]) -> list[Extent] | None:
        if any(size <= 0 for size in sizes):
            raise ValueError("no")
        return super().allocate(sizes)


def miscounts(
    name: str, test: str, rule: str, change: Callable[[AllocatorStatistics], dict[str, Any]], **options: object
) -> None:
    """Note an allocator whose statistics are changed before they are told."""

    class Miscounting(FirstFitAllocator):
        def statistics(self) -> AllocatorStatistics:
            found = super().statistics()
            return attrs.evolve(found, **change(found))

    Miscounting.__name__ = name
    wrong(test, rule, **options)(Miscounting)


def a_unit_less(found: AllocatorStatistics) -> dict[str, Any]:
    return {"largest_free_extent_bytes": max(0, found.largest_free_extent_bytes - UNIT)}


def at_least_free(length: int) -> Callable[[AllocatorStatistics], dict[str, Any]]:
    return lambda found: {"largest_free_extent_bytes": max(length, found.largest_free_extent_bytes)}


miscounts(
    "CountsLengths",
    ANY_ORDER,
    "what is used is the sum of the footprints",
    lambda found: {"used_bytes": found.used_bytes + (found.extents > 3)},
)
miscounts("CountsBatches", ANY_ORDER, "statistics count the extents", lambda found: {"extents": min(3, found.extents)})
miscounts("CountsOneArena", ANY_ORDER, "statistics count the arenas", lambda found: {"arenas": 1})
miscounts("TellsAnotherUnit", ANY_ORDER, "statistics have the unit", lambda found: {"unit_bytes": 4096})
miscounts(
    "TellsAllThatIsFree",
    ANY_ORDER,
    "the largest free extent is no longer than the longest free run",
    lambda found: {"largest_free_extent_bytes": found.free_bytes},
)
miscounts("TellsLess", ANY_ORDER, "no block is larger than the largest free extent", a_unit_less)
miscounts(
    "KeepsAUnit", ANY_ORDER, "the largest free extent is the longest free run", a_unit_less, uses_any_free_run=True
)
miscounts("AlwaysHasAUnit", BEFORE, "without an arena nothing can be placed", at_least_free(UNIT))
miscounts("NeverFull", REFILL, "a full pool has no larger free extent than it places", at_least_free(64 * UNIT))
miscounts(
    "NeverEmpty",
    REFILL,
    "when everything is freed, nothing is used",
    lambda found: {"used_bytes": max(UNIT, found.used_bytes)},
)
miscounts("OtherName", NAME, "statistics have the strategy's name", lambda found: {"name": "best-fit"})


def contract_of(
    tested: type[Allocator], options: Mapping[str, object] = MappingProxyType({}), examples: int = 300
) -> type[AllocatorContract]:
    quick = settings(
        max_examples=examples, phases=[Phase.generate], report_multiple_bugs=False, derandomize=True, database=None
    )
    return type("Contract", (AllocatorContract,), {"allocator": tested, "settings": quick, **options})


@pytest.mark.parametrize("expected", wrong_allocators, ids=lambda expected: expected.allocator.__name__)
def test_a_wrong_allocator_is_found(expected: Expected) -> None:
    contract = contract_of(expected.allocator, expected.options)()
    with pytest.raises((ContractViolation, TypeError), match=re.escape(expected.rule)):
        getattr(contract, expected.test)()


def test_every_test_of_the_suite_finds_something() -> None:
    tests = {name for name in dir(AllocatorContract) if name.startswith("test_")}
    assert {expected.test for expected in wrong_allocators} == tests


def test_every_rule_of_the_suite_finds_something() -> None:
    """The rules are the second arguments of `require`, where these are plain text."""
    calls = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(contract)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "require"
    ]
    rules = {call.args[1].value for call in calls if isinstance(call.args[1], ast.Constant)}
    assert len(rules) > 30
    named = {expected.rule for expected in wrong_allocators}
    assert {rule for rule in rules if not any(words in str(rule) for words in named)} == set()


def test_what_is_broken_is_named_without_pytest() -> None:
    assert broken_rules(contract_of(FirstFitAllocator, examples=5)) == {}
    broken = broken_rules(contract_of(NoName, examples=5))
    assert NAME in broken
    assert broken[NAME] == "ContractViolation: a strategy has a name; found \"''\""
