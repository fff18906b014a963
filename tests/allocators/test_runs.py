"""The map of units finds the holes that a walk over the bits finds, whatever it
remembers of earlier searches.
"""

import sys
from collections.abc import Iterator
from itertools import groupby
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from infinistore.allocators import runs
from infinistore.allocators.runs import UnitMap


class HoleMachine(RuleBasedStateMachine):
    window: ClassVar[int]

    @initialize(arenas=st.lists(st.integers(0, 600), min_size=1, max_size=3))
    def make(self, arenas: list[int]) -> None:
        self.map = UnitMap()
        self.bits: list[int] = []
        for units in arenas:
            self.map.add_arena(units)
            self.bits += [0] * units + [1]

    @rule(place=st.integers(0, 2000), units=st.integers(1, 200))
    def take_a_run(self, place: int, units: int) -> None:
        place %= len(self.bits)
        run = self.bits[place : place + units]
        if 1 not in run and run:
            self.map.take_run(place, len(run))
            self.bits[place : place + len(run)] = [1] * len(run)

    @rule(place=st.integers(0, 2000), step=st.integers(1, 9), count=st.integers(1, 80))
    def take_each_of_some(self, place: int, step: int, count: int) -> None:
        places = [unit for unit in range(place, place + step * count, step) if unit < len(self.bits)]
        free = [unit for unit in places if not self.bits[unit]]
        if free:
            self.map.take_each(free)
            for unit in free:
                self.bits[unit] = 1

    @rule(place=st.integers(0, 2000), units=st.integers(1, 200))
    def give_back_a_run(self, place: int, units: int) -> None:
        place %= len(self.bits)
        run = self.bits[place : place + units]
        if run and all(run) and not any(end in self.map.ends for end in range(place, place + len(run))):
            self.map.give_back_run(place, len(run))
            self.bits[place : place + len(run)] = [0] * len(run)

    @rule(place=st.integers(0, 2000), step=st.integers(1, 9), count=st.integers(1, 80))
    def give_back_each_of_some(self, place: int, step: int, count: int) -> None:
        places = [unit for unit in range(place, place + step * count, step) if unit < len(self.bits)]
        taken = [unit for unit in places if self.bits[unit] and unit not in self.map.ends]
        if taken:
            self.map.give_back_each(taken)
            for unit in taken:
                self.bits[unit] = 0

    def holes(self) -> list[tuple[int, int]]:
        found = []
        first = None
        for unit, bit in enumerate(self.bits):
            if bit and first is not None:
                found.append((first, unit))
                first = None
            elif not bit and first is None:
                first = unit
        return found

    @rule(
        units=st.one_of(st.integers(1, 20), st.integers(50, 80), st.integers(1, 700)),
        start=st.integers(0, 2000),
        wanted=st.integers(0, 2000),
    )
    def find_holes(self, units: int, start: int, wanted: int) -> None:
        start %= len(self.bits)
        expected = [(first, end) for first, end in self.holes() if end - first >= units]
        assert sorted(self.map.holes(units, start)) == expected
        room = sum((end - first) // units for first, end in expected)
        assert self.map.has_room(units, room or 1) == (room > 0)
        assert not self.map.has_room(units, room + 1)
        places = self.map.best_fits(units, room + 1, start)
        assert places is None
        wanted = min(room, wanted)
        places = self.map.best_fits(units, wanted, start)
        assert places is not None
        assert len(set(places)) == len(places) == wanted
        for first in places:
            assert 1 not in self.bits[first : first + units]

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "map"):
            assert self.map.free_units == self.bits.count(0)
            assert self.map.largest_hole() == max((end - first for first, end in self.holes()), default=0)


TestHoles = HoleMachine.TestCase


@pytest.mark.parametrize("length", [2, 3, 17, 63, 64, 200])
@pytest.mark.parametrize("before", [0, 1, 31, 64])
def test_a_hole_is_found_across_the_edge_of_a_window(monkeypatch: pytest.MonkeyPatch, length: int, before: int) -> None:
    monkeypatch.setattr(runs, "WINDOW_UNITS", 64)
    units = UnitMap()
    units.add_arena(1000)
    units.take_run(0, 1000)
    first = 512 - before
    units.give_back_run(first, length)
    assert list(units.holes(length)) == [(first, first + length)]
    assert list(units.holes(length, first + length // 2)) == [(first, first + length)]
    assert list(units.holes(length + 1)) == []


def test_each_hole_is_found_once_and_those_after_the_start_come_first() -> None:
    units = UnitMap()
    units.add_arena(4000)
    units.take_run(0, 4000)
    for first in (760, 2000):
        units.give_back_run(first, 80)
    for start in (841, 850, 1999):
        assert list(units.holes(70, start)) == [(2000, 2080), (760, 840)]


def test_of_several_holes_the_shortest_that_fits_is_filled_first() -> None:
    units = UnitMap()
    units.add_arena(300)
    for taken in (90, 110, 160, 250):  # holes of 90, 19, 49, 89 and 49 units
        units.take_run(taken, 1)
    assert units.best_fits(15, 1) == [91]
    assert units.best_fits(15, 4) == [91, 111, 126, 141]


# Holes, compared with a walk over the bits


def map_of(*arenas: str) -> UnitMap:
    """A map of arenas as they are drawn: `#` is a taken unit, `.` a free one."""
    units = UnitMap()
    for drawn in arenas:
        first = len(units.taken)
        units.add_arena(len(drawn))
        taken = [first + place for place, unit in enumerate(drawn) if unit == "#"]
        if taken:
            units.take_each(taken)
    return units


def walked(units: UnitMap, least: int = 1) -> list[tuple[int, int]]:
    """The holes of at least so many units, in order."""
    found = []
    place = 0
    for taken, group in groupby(units.taken.tolist()):
        end = place + len(list(group))
        if not taken and end - place >= least:
            found.append((place, end))
        place = end
    return found


DRAWN = [
    ("...#.##....#.##..",),
    ("#.....##.#...", "...#", "", "....#.."),
    ("." * 70 + "##" + "." * 63 + "#" + "." * 130, "#" + "." * 64 + "#" * 80 + "." * 100),
]


@pytest.mark.parametrize("drawn", DRAWN, ids=["one arena", "several arenas", "long holes"])
def test_holes_come_in_order_from_the_one_that_the_start_lies_in_or_behind_and_then_from_zero(
    drawn: tuple[str, ...],
) -> None:
    units = map_of(*drawn)
    for length in (1, 2, 3, 5, 63, 64, 65, 71, 100):
        for start in range(len(units.taken)):
            found = walked(units, length)
            later = [hole for hole in found if hole[1] >= start]
            assert list(units.holes(length, start)) == later + [hole for hole in found if hole not in later]
        assert list(units.holes(length)) == walked(units, length)


@pytest.mark.parametrize("length", range(64, 81))
def test_a_long_hole_is_found_wherever_its_bytes_begin(length: int) -> None:
    for before in range(1, 10):
        for between in (1, 2, 8, 9):
            lengths = (length, length - 1, length, length + 1, length)
            units = map_of("#" * before + ("#" * between).join("." * each for each in lengths))
            assert list(units.holes(length)) == walked(units, length)
            assert list(units.holes(length, before + length + between)) == [
                *walked(units, length)[1:],
                walked(units)[0],
            ]


@pytest.mark.parametrize("window", [16, 64])
def test_a_look_near_by_goes_a_bounded_way_and_round_the_map_past_every_hole(
    monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    monkeypatch.setattr(runs, "WINDOW_UNITS", window)
    for last in ".#":
        units = map_of("####....####" + "#" * 20 + "...###....", "#" * 30, "." * 40 + "#" * 20 + last)
        for length in (1, 4, 5, 41):
            start, firsts = 0, []
            for _ in range(len(units.taken) // window + 1):
                first, after = units.hole_near(length, start)
                assert (after or len(units.taken)) <= start + max(window, length) + 41  # to the end of a hole
                if first is not None:
                    firsts.append(first)
                start = after
                if not after:
                    break
            assert start == 0  # round
            assert set(firsts) <= {first for first, _ in walked(units, length)}
            assert bool(firsts) == bool(walked(units, length))


def test_a_look_near_by_finds_the_hole_that_it_begins_in_and_none_far_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "WINDOW_UNITS", 16)
    units = map_of("####....####" + "#" * 20 + "....####")
    for start in range(8):
        assert units.hole_near(4, start)[0] == 4
    assert units.hole_near(4, 9)[0] is None
    assert [units.hole_near(4, start)[0] for start in (32, 33, 35)] == [32, 32, 32]


# What is remembered of a search that found nothing

TOO_LONG = 3


def changes_of(units: UnitMap) -> Iterator[tuple[str, int, int]]:
    """Every change of a run of up to seven units."""
    for first in range(len(units.taken)):
        for count in range(1, 8):
            run = units.taken[first : first + count]
            if len(run) == count and not any(first <= end < first + count for end in units.ends):
                if run.all():
                    yield "give back", first, count
                elif not run.any():
                    yield "take", first, count


def change(units: UnitMap, what: str, first: int, count: int, *, each: bool) -> None:
    if what == "take":
        units.take_each([*range(first, first + count)]) if each else units.take_run(first, count)
    else:
        units.give_back_each([*range(first, first + count)]) if each else units.give_back_run(first, count)


@pytest.mark.parametrize("take_each", [False, True], ids=["take runs", "take each"])
@pytest.mark.parametrize("give_each", [False, True], ids=["give back runs", "give back each"])
def test_after_a_search_that_failed_the_holes_made_since_are_found(give_each: bool, take_each: bool) -> None:
    each = {"give back": give_each, "take": take_each}
    drawn = ("..####..#####", "#..")
    start = map_of(*drawn)
    for one in changes_of(start):
        first = map_of(*drawn)
        assert list(first.holes(TOO_LONG)) == []
        change(first, *one, each=each[one[0]])
        for other in changes_of(first):
            second = map_of(*drawn)
            assert list(second.holes(TOO_LONG)) == []
            change(second, *one, each=each[one[0]])
            change(second, *other, each=each[other[0]])
            for length in (TOO_LONG, TOO_LONG + 1, 7):
                assert sorted(second.holes(length)) == walked(second, length)


@given(
    drawn=st.lists(st.text("#.", max_size=30), min_size=1, max_size=3),
    length=st.integers(2, 6),
    choices=st.lists(st.tuples(st.integers(0, 10**6), st.booleans()), max_size=12),
)
def test_however_much_changes_since_a_search_that_failed_every_hole_is_found(
    drawn: list[str], length: int, choices: list[tuple[int, bool]]
) -> None:
    units = map_of(*(arena.replace("." * length, "." * (length - 1) + "#") for arena in drawn))
    assert list(units.holes(length)) == []
    for choice, each in choices:
        possible = list(changes_of(units))
        if possible:
            change(units, *possible[choice % len(possible)], each=each)
        for least in (length, length + 1, length + 3):
            assert sorted(units.holes(least)) == walked(units, least)


def test_a_search_that_failed_is_not_made_again() -> None:
    """Until much has changed since: counted in calls, not in time."""
    units = map_of("..##" * 50_000)

    def calls_of_a_search(length: int) -> int:
        calls = 0

        def count(_: object, event: str, __: object) -> None:
            nonlocal calls
            calls += event == "c_call"

        sys.setprofile(count)
        try:
            found = list(units.holes(length))
        finally:
            sys.setprofile(None)
        assert found == walked(units, length)
        return calls

    at_first = calls_of_a_search(3)
    assert calls_of_a_search(3) < at_first / 2
    assert calls_of_a_search(200) < at_first / 2
    units.give_back_run(2, 2)
    assert calls_of_a_search(3) < at_first / 2


# Where blocks are placed


def test_few_of_many_holes_are_compared_and_those_after_the_start_first() -> None:
    units = map_of("...#" * 64 + ".#" + "...#" * 100)
    assert units.best_fits(1, 1) == [0]  # the shortest hole is the 65th
    assert units.best_fits(1, 3 * 64) == [place for place in range(256) if place % 4 != 3]
    assert units.best_fits(1, 1, start=4) == [256]
    assert units.best_fits(1, 1, start=300) == [298]


def test_a_block_that_fits_is_not_compared_with_all_of_a_map_that_fills_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "WINDOW_UNITS", 1000)
    units = UnitMap()
    units.add_arena(100_000)
    units.take_run(0, 500)
    for place in range(1000, 100_000, 400):
        units.take_run(place, 1)
    looked_at = 0
    holes = units.holes

    def counted(length: int, start: int = 0) -> Iterator[tuple[int, int]]:
        nonlocal looked_at
        for hole in holes(length, start):
            looked_at += 1
            yield hole

    monkeypatch.setattr(units, "holes", counted)
    assert units.best_fits(16, 2, 500) == [1001, 1017], "the shortest of those that were compared"
    assert looked_at == 3
    assert units.best_fits(16, 100, 500) is not None
    assert looked_at == 3 + 4, "as many as it takes"


def test_units_are_counted_without_what_separates_arenas() -> None:
    units = map_of(".#.", "..")
    assert (units.units, units.free_units) == (5, 4)


def test_a_unit_lies_in_the_arena_that_begins_at_it_or_before() -> None:
    units = map_of("...", "#", "..")
    assert [units.arena_of(unit) for unit in (0, 2, 4, 6, 7)] == [0, 0, 1, 2, 2]


def test_units_that_are_taken_are_counted_in_equal_parts_of_an_arena() -> None:
    units = map_of("##########", "#..##.#...#")
    assert units.taken_in(0, 2) == [5, 5]
    assert units.taken_in(1, 1) == [5]
    assert units.taken_in(1, 2) == [3, 2]
    assert units.taken_in(1, 3) == [1, 3, 1]
    assert units.taken_in(1, 11) == [1, 0, 0, 1, 1, 0, 1, 0, 0, 0, 1]
