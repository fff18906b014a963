"""The connections of a store between two calls: which of them the next call takes."""

import math
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from infinistore.client.connection.calls import Calls
from infinistore.client.connection.pool import Turns, new_turn
from infinistore.client.options import Options, StoreUrl
from infinistore.errors import StoreUnavailable

NOWHERE = StoreUrl("tcp", "127.0.0.1", 1, "", {})


class PinnedMeanwhile:
    """The pins of a connection that another thread takes, just when it has none, and
    gives back with new ones.
    """

    def __init__(self, calls: Calls[Any]) -> None:
        self._calls = calls
        self._asked = 0

    @property
    def in_use(self) -> bool:
        self._asked += 1
        if self._asked > 1:
            return True
        link = self._calls.pool.take(pinning=True)
        assert link is not None
        self._calls.pool.pinned.append(link)
        return False


def test_a_connection_that_another_thread_just_pinned_on_is_not_among_those_without_pins() -> None:
    calls: Calls[Any] = Calls(NOWHERE, Options(), lambda: 0.0, Random(1))
    link = mock.Mock()
    link.pins = PinnedMeanwhile(calls)
    calls.pool.pinned.append(link)
    assert calls.pool.take(pinning=False) is None
    assert (calls.pool.idle, calls.pool.pinned) == ([], [link])
    assert calls.pool.take(pinning=True) is link


def test_a_connection_whose_pins_have_gone_is_used_again() -> None:
    calls: Calls[Any] = Calls(NOWHERE, Options(), lambda: 0.0, Random(1))
    link = mock.Mock()
    link.pins.in_use = False
    calls.pool.pinned.append(link)
    assert calls.pool.take(pinning=False) is link
    assert (calls.pool.idle, calls.pool.pinned) == ([], [])


class EndingTurn:
    """The turn of a call that ends just when somebody looks at it: it gives its
    connection back, and is over.
    """

    def __init__(self, ending: Callable[[], object]) -> None:
        self._ending = ending

    def locked(self) -> bool:
        self._ending()
        return False


def test_a_connection_given_back_while_interrupted_ones_are_looked_for_is_not_closed() -> None:
    calls: Calls[Any] = Calls(NOWHERE, Options(), lambda: 0.0, Random(1))
    link = mock.Mock()
    link.turn = EndingTurn(lambda: calls.pool.idle.append(link))
    calls.pool.connections.add(link)
    calls.pool.close_interrupted()
    assert not link.close.called
    assert calls.pool.take(pinning=False) is link


def test_calls_that_begin_and_end_while_interrupted_ones_are_looked_for_disturb_nothing() -> None:
    turns = Turns(8)
    turns.under_way[EndingTurn(lambda: turns.under_way.update({new_turn(): None}))] = None
    assert turns.free == 7  # the one that began meanwhile was not forgotten: it was not looked at
    assert turns.free == 8


def waiting_calls(turns: Turns, limits: Sequence[SimpleNamespace]) -> list[threading.Thread]:
    """Calls in threads that all wait for their turn."""

    def call(limit: Any) -> None:
        turn = new_turn()
        with turn, suppress(TimeoutError):
            turns.begin(turn, limit)
            turns.end(turn)

    before = len(turns.waiting)
    threads = [threading.Thread(target=call, args=(limit,)) for limit in limits]
    for thread in threads:
        thread.start()
    while len(turns.waiting) < before + len(threads):
        pass
    return threads


def test_a_wait_for_a_turn_ends_with_its_deadline_whatever_a_signal_handler_takes() -> None:
    turns = Turns(1)
    first, second = new_turn(), new_turn()
    deadline = time.monotonic() + 0.2  # real time: a lock in C waits for it

    def handle(*_: object) -> None:
        while time.monotonic() <= deadline:  # real time: it takes until the deadline
            pass

    def interrupt() -> None:
        while not turns.waiting:
            pass
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handle)
    thread = threading.Thread(target=interrupt)
    try:
        with first, second:
            turns.begin(first, SimpleNamespace(deadline=math.inf))
            thread.start()
            with pytest.raises(TimeoutError):
                turns.begin(second, SimpleNamespace(deadline=deadline))
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)


NEVER = 3600.0
"""When calls that wait look again whether one was interrupted."""


def test_calls_that_wait_have_their_turns_one_after_the_other() -> None:
    turns = Turns(1, look_again_s=NEVER)
    first = new_turn()
    with first:
        turns.begin(first, SimpleNamespace(deadline=math.inf))
        threads = waiting_calls(turns, [SimpleNamespace(deadline=math.inf) for _ in range(8)])
        turns.end(first)
    for thread in threads:
        thread.join()
    assert (turns.free, turns.waiting) == (1, {})


def test_calls_that_wait_look_at_their_limits_when_they_are_woken() -> None:
    turns = Turns(1, look_again_s=NEVER)
    first, limits = new_turn(), [SimpleNamespace(deadline=math.inf) for _ in range(3)]
    with first:
        turns.begin(first, SimpleNamespace(deadline=math.inf))
        threads = waiting_calls(turns, limits)
        for limit in limits:
            limit.deadline = 0
        turns.wake()
        for thread in threads:
            thread.join()
        assert (turns.free, turns.waiting) == (0, {})


def test_a_call_whose_turn_comes_when_it_gives_up_passes_it_on() -> None:
    turns = Turns(1, look_again_s=NEVER)
    first, second = new_turn(), new_turn()
    threads: list[threading.Thread] = []

    class Limit:
        """The time is up when the call before is over, for which another waits, too."""

        @property
        def deadline(self) -> float:
            threads.extend(waiting_calls(turns, [SimpleNamespace(deadline=math.inf)]))
            turns.end(first)
            return 0.0

    with first, second:
        turns.begin(first, SimpleNamespace(deadline=math.inf))
        with pytest.raises(TimeoutError):
            turns.begin(second, cast(Any, Limit()))
    threads[0].join()
    assert turns.free == 1


def test_a_call_that_gives_up_while_it_is_told_passes_its_turn_on() -> None:
    turns = Turns(1, look_again_s=NEVER)
    first = new_turn()
    asked, told = threading.Event(), threading.Event()

    class Limit:
        """The time is up as soon as the call is told that it may begin."""

        @property
        def deadline(self) -> float:
            asked.set()
            told.wait()
            return 0.0

    class ToldTurn:
        """One that is looked at to be told, and is gone before it is, if it can be."""

        def locked(self) -> bool:
            told.set()
            giving_up.join(0.2)  # real time: it must not end yet
            return True

    def give_up() -> None:
        with suppress(TimeoutError):
            turns.begin(ToldTurn(), cast(Any, Limit()))

    giving_up = threading.Thread(target=give_up)
    with first:
        turns.begin(first, SimpleNamespace(deadline=math.inf))
        giving_up.start()
        asked.wait()
        [other] = waiting_calls(turns, [SimpleNamespace(deadline=math.inf)])
        turns.end(first)
    for thread in (other, giving_up):
        thread.join()
    assert turns.free == 1


def test_the_pauses_of_a_store_come_from_its_generator() -> None:
    def pauses(random: Random) -> list[float | None]:
        calls: Calls[Any] = Calls(NOWHERE, Options(), lambda: 0.0, random)
        return [calls.breaker.failed(StoreUnavailable("lost"), 0) for _ in range(3)]

    assert pauses(Random(7)) == pauses(Random(7)) != pauses(Random(8))
