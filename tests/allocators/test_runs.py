"""The map of units finds the holes that a walk over the bits finds, whatever it remembers of earlier searches."""

from typing import ClassVar

import pytest
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

    @rule(units=st.one_of(st.integers(1, 20), st.integers(50, 80), st.integers(1, 700)), start=st.integers(0, 2000))
    def find_holes(self, units: int, start: int) -> None:
        start %= len(self.bits)
        expected = [(first, end) for first, end in self.holes() if end - first >= units]
        assert sorted(self.map.holes(units, start)) == expected
        room = sum((end - first) // units for first, end in expected)
        assert self.map.has_room(units, room or 1) == (room > 0)
        assert not self.map.has_room(units, room + 1)
        places = self.map.best_fits(units, room + 1, start)
        assert places is None
        places = self.map.best_fits(units, room, start)
        assert places is not None
        assert len(set(places)) == room
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
    monkeypatch.setattr(runs, "_WINDOW_UNITS", 64)
    units = UnitMap()
    units.add_arena(1000)
    units.take_run(0, 1000)
    first = 512 - before
    units.give_back_run(first, length)
    assert list(units.holes(length)) == [(first, first + length)]
    assert list(units.holes(length, first + length // 2)) == [(first, first + length)]
    assert list(units.holes(length + 1)) == []


def test_of_several_holes_the_shortest_that_fits_is_filled_first() -> None:
    units = UnitMap()
    units.add_arena(300)
    for taken in (90, 110, 160, 250):  # holes of 90, 19, 49, 89 and 49 units
        units.take_run(taken, 1)
    assert units.best_fits(15, 1) == [91]
    assert units.best_fits(15, 4) == [91, 111, 126, 141]
