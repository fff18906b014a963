"""The log of removals: what it tells is what a list of all removals says."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from infinistore.core import StoreCore
from infinistore.core.removals import KEPT_S, RemovalLog, Told

from .conftest import FakeClock

NOBODY: Callable[[list[str]], bytes] = lambda keys: bytes(len(keys))  # noqa: E731
START = (0, 0)


def make_log(clock: FakeClock, **bounds: int) -> RemovalLog:
    return RemovalLog(clock, random.Random(1), **bounds)


def put(core: StoreCore, client: Any, *keys: str) -> None:
    core.commit(core.reserve(client, [64] * len(keys)), keys, None)


def ask(core: StoreCore, place: tuple[int, int], most: int = 100) -> Told:
    return core.removal_log.told(place, most, core.index.contains_many)


class Removals(RuleBasedStateMachine):
    """A log against a list of everything. Several follow it, each at its own pace."""

    @initialize(most_keys=st.integers(1, 12), most_bytes=st.integers(1, 40))
    def begin(self, most_keys: int, most_bytes: int) -> None:
        self.clock = FakeClock()
        self.log = make_log(self.clock, most_keys=most_keys, most_bytes=most_bytes)
        self.most_keys, self.most_bytes = most_keys, most_bytes
        self.all: list[str] = []
        self.place = [self.log.told(START, 1, NOBODY).place for _ in range(3)]
        self.read = [0, 0, 0]

    @rule(keys=st.lists(st.text("abc", min_size=1, max_size=6), max_size=20))
    def remove(self, keys: list[str]) -> None:
        self.log.note(keys)
        self.all += keys

    @rule(who=st.integers(0, 2), most=st.integers(0, 8), there=st.sets(st.sampled_from("abc")))
    def follow(self, who: int, most: int, there: set[str]) -> None:
        told = self.log.told(self.place[who], most, lambda keys: bytes(key in there for key in keys))
        assert told.missed is not None
        first = self.read[who] + told.missed
        end = told.place[1]
        expected = self.all[first:end]
        assert end - first <= most
        assert told.keys == [key for key in dict.fromkeys(expected) if key not in there]
        kept = self.all[first:]
        if told.missed:  # only what is over a bound is missed
            before = [self.all[first - 1], *kept]
            assert len(before) > self.most_keys or sum(map(len, before)) > self.most_bytes
        assert len(kept) <= self.most_keys or told.missed == 0
        assert end == min(first + most, len(self.all))
        self.place[who], self.read[who] = told.place, end


TestRemovals = Removals.TestCase


@given(st.lists(st.integers(0, 30), max_size=20))
def test_a_log_keeps_no_more_than_its_bounds(counts: list[int]) -> None:
    log = make_log(FakeClock(), most_keys=10, most_bytes=28)
    if sum(counts) % 2:
        log.told(START, 1, NOBODY)
        log.note(["before"])
        log.end()
    place = log.told(START, 1, NOBODY).place
    names = [f"{number:04}" for number in range(sum(counts))]
    left = list(names)
    for count in counts:
        log.note(left[:count])
        del left[:count]
    told = log.told(place, 1000, NOBODY)
    assert told.keys == names[-7:]  # 28 bytes
    assert told.missed == max(0, len(names) - 7)


def test_a_log_ends_some_time_after_the_last_question(clock: FakeClock) -> None:
    log = make_log(clock)
    place = log.told(START, 1, NOBODY).place
    clock.now += KEPT_S
    log.note(["kept"])
    assert log.told(place, 9, NOBODY).keys == ["kept"]
    clock.now += KEPT_S + 1
    log.note(["late"])
    assert not log.is_kept
    assert log.told(place, 9, NOBODY).missed is None


def test_nobody_who_waits_is_called_twice(clock: FakeClock) -> None:
    log = make_log(clock)
    log.told(START, 1, NOBODY)
    calls: list[str] = []
    one, other = (lambda: calls.append("one")), (lambda: calls.append("other"))
    log.waiting += [one, other]
    log.stop_waiting(other)
    log.note([])
    assert calls == []
    log.note(["a"])
    log.note(["b"])
    log.stop_waiting(one)
    assert calls == ["one"]


def test_a_number_from_the_future_is_refused(clock: FakeClock) -> None:
    log = make_log(clock)
    place = log.told(START, 1, NOBODY).place
    with pytest.raises(ValueError, match="there have been 0"):
        log.told((place[0], 1), 1, NOBODY)


@pytest.mark.parametrize(("bit", "log_id"), [(0, 1), (1, 2**63)])
def test_a_log_has_an_id_while_it_is_kept(clock: FakeClock, bit: int, log_id: int) -> None:
    source = random.Random()
    source.getrandbits = lambda count: bit * (2**count - 1)  # type: ignore[method-assign]
    log = RemovalLog(clock, source)
    assert (log.id, log.next) == (0, 0)
    assert log.told(START, 1, NOBODY) == Told([], (log_id, 0), 0)
    assert log.told((log_id + 1, 5), 1, NOBODY) == Told([], (log_id, 0), None)
    log.end()
    assert (log.id, log.next) == (0, 0)


def test_nothing_is_kept_while_nobody_follows(core: StoreCore) -> None:
    client = core.open_client("c")
    put(core, client, "a")
    core.delete(["a"])
    assert not core.removal_log.is_kept
    assert core.removal_log.next == 0


def test_what_counts_as_removed(core: StoreCore, clock: FakeClock) -> None:
    client = core.open_client("c")
    place = ask(core, START).place

    def told() -> list[str]:
        nonlocal place
        answer = ask(core, place)
        assert answer.missed == 0
        place = answer.place
        return answer.keys

    put(core, client, "a", "b")
    put(core, client, "a")
    assert told() == []  # one block over another
    assert core.delete(["missing", "a", "a"]) == 1
    assert told() == ["a"]
    assert core.evict(0.0, 0.0) == 1
    assert told() == ["b"]
    core.commit(core.reserve(client, [64]), ["ends"], None, ttl_s=5.0)
    clock.now += 6
    assert told() == ["ends"]
    put(core, client, "p", "q")
    core.purge()
    assert sorted(told()) == ["p", "q"]
    put(core, client, "again")
    core.delete(["again"])
    put(core, client, "again")
    assert told() == []  # it is there
    core.evict_keys(["again", "missing"])
    assert told() == ["again"]
    for number in range(200):  # more than fits
        put(core, client, f"n{number}")
    removed, there = ask(core, place, 1000).keys, list(core.index)
    assert removed
    assert sorted(removed + there) == sorted(f"n{number}" for number in range(200))


def test_a_block_that_is_damaged_is_removed(core: StoreCore) -> None:
    client = core.open_client("c")
    place = ask(core, START).place
    core.commit(core.reserve(client, [64]), ["bad"], [12345])
    assert not core.verify("bad")
    assert ask(core, place).keys == ["bad"]
