"""The connections of a store between two calls: which of them the next call takes."""

from collections.abc import Callable
from random import Random
from typing import Any
from unittest import mock

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


def test_the_pauses_of_a_store_come_from_its_generator() -> None:
    def pauses(random: Random) -> list[float | None]:
        calls: Calls[Any] = Calls(NOWHERE, Options(), lambda: 0.0, random)
        return [calls.breaker.failed(StoreUnavailable("lost"), 0) for _ in range(3)]

    assert pauses(Random(7)) == pauses(Random(7)) != pauses(Random(8))
