"""Pins are given back once, in order, without waiting, and whatever becomes of the
connection.
"""

import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.client.memory.pins import Owed, Pins
from infinistore.protocol.codec import encode_head
from infinistore.protocol.messages import Abort, Release
from infinistore.protocol.states import State

QUIET = (State.READY, State.REPLYING)
THINGS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 99)), max_size=9)


class Socket:
    """Takes so many sends and then none until somebody reads."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.sent = b""

    def send(self, data: bytes, flags: int) -> int:
        assert flags == socket.MSG_DONTWAIT
        assert data
        if not self.room:
            raise BlockingIOError
        self.room -= 1
        self.sent += data
        return len(data)


def owed(things: list[tuple[int, int]]) -> list[Owed]:
    numbers = iter(range(1, 1000))
    kinds: list[Any] = [Release, Abort]
    return [
        Owed([kind(next(numbers)) for kind in kinds[:messages]], leased_bytes=leased_bytes)
        for messages, leased_bytes in things
    ]


def pins_of(sock: object, things: list[Owed], state: State = State.READY) -> tuple[Pins, list[str]]:
    """The pins of a connection, and a list of what becomes of it."""
    events: list[str] = []
    connection = SimpleNamespace(state=state, close=lambda: events.append("given up"))
    pins = Pins(cast(Any, SimpleNamespace(socket=sock)), cast(Any, connection))
    assert (pins.hazards, pins.reserved, pins.leased_bytes) == (None, False, 0)
    pins.leased_bytes = 7 + sum(thing.leased_bytes for thing in things)
    pins.watching = cast(Any, set(range(len(things))))
    return pins, events


def close_of(pins: Pins, events: list[str]) -> None:
    def close() -> None:
        events.append("closed")
        raise OSError

    pins.hazards = cast(Any, "a table")
    pins.close_after(close)


@given(THINGS, st.sampled_from([1, 50]), st.integers(0, 4), st.sampled_from(QUIET), st.booleans())
def test_what_there_is_no_room_for_is_sent_later_unless_the_connection_is_given_up(
    things: list[tuple[int, int]], times: int, room: int, state: State, gives_up: bool
) -> None:
    left, sock = owed(things * times), Socket(room)
    pins, events = pins_of(sock, left, state)
    everything = b"".join(encode_head(message, request_id=0) for thing in left for message in thing.messages)
    if gives_up:
        close_of(pins, events)
        assert events == ([] if left else ["closed"])
    while left:
        taken = pins.give_back(left)
        pins.watching = cast(Any, set(range(len(left) - taken)))
        assert pins.leased_bytes == 7
        del left[:taken]
        assert not left or (sock.room == 0 and not gives_up)
        sock.room = 1
    assert everything.startswith(sock.sent)
    assert gives_up or everything == sock.sent
    assert events == (["closed"] if gives_up else [])
    assert pins.hazards is None


@pytest.mark.parametrize("state", [state for state in State if state not in QUIET])
def test_nothing_is_sent_after_an_incomplete_frame_or_the_end(state: State) -> None:
    things = owed([(2, 5)])
    pins, events = pins_of(None, things, state)
    assert pins.give_back(things) == 1
    assert (pins.leased_bytes, events) == (7, [])


def test_the_server_that_is_gone_has_no_pins() -> None:
    def send(data: bytes, flags: int) -> int:
        raise BrokenPipeError

    things = owed([(1, 0)])
    pins, events = pins_of(SimpleNamespace(send=send), things)
    assert pins.give_back(things) == 1
    assert events == []


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_half_a_message_ends_the_connection(error: type[BaseException] | None) -> None:
    def send(data: bytes, flags: int) -> int:
        if error is not None:
            raise error
        return len(data) - 1

    things = owed([(1, 0)])
    pins, events = pins_of(SimpleNamespace(send=send), things)
    if error is None:
        assert pins.give_back(things) == 1
    else:
        with pytest.raises(error):
            pins.give_back(things)
    assert events == ["given up"]
