"""Waiting awake: it is short, it is for a stream that is alone, and others have their
turn meanwhile.
"""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple, cast

import pytest
import trio
import trio.testing

from infinistore.protocol.frame_reader import READ_AHEAD_BYTES
from infinistore.settings import Spin
from infinistore.transports.sockets.spin import Spinner
from infinistore.transports.sockets.trio_streams import SocketStream

STEP_S = 50e-6


class SteppingClock:
    """Every look at it takes as long."""

    def __init__(self, step_s: float = STEP_S) -> None:
        self.now = 0.0
        self._step_s = step_s

    def __call__(self) -> float:
        self.now += self._step_s
        return self.now


class Spinning(NamedTuple):
    """A stream that has been alone for long, its peer, and what decides when the stream
    waits awake.
    """

    stream: SocketStream
    peer: SocketStream
    spinner: Spinner

    @asynccontextmanager
    async def receiving(self, length: int = 1) -> AsyncIterator[None]:
        """Let the stream wait for as much at most until the end of the block."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.stream.receive_into, [memoryview(bytearray(length))])
            yield
            await self.peer.send_all([memoryview(b"x")])

    async def spins(self, length: int = 1) -> int:
        """How often it has waited awake when it leaves waiting to the kernel."""
        async with self.receiving(length):
            await trio.testing.wait_all_tasks_blocked()
            return self.spinner.statistics().spins


@pytest.fixture
async def spinning() -> AsyncIterator[Spinning]:
    clock = SteppingClock()
    spinner = Spinner(400, clock)
    left, right = socket.socketpair()
    stream, peer = SocketStream(left, spinner), SocketStream(right)
    spinner.moved(stream)
    clock.now += 0.1
    spinner.moved(stream)
    yield Spinning(stream, peer, spinner)
    stream.close()
    peer.close()


async def test_a_stream_that_was_quick_is_waited_for_awake_once(spinning: Spinning) -> None:
    assert await spinning.spins() == 1
    assert spinning.spinner.statistics().hits == 0


@pytest.mark.parametrize(("length", "spins"), [(READ_AHEAD_BYTES, 1), (READ_AHEAD_BYTES + 1, 0)])
async def test_a_head_is_waited_for_awake_and_a_payload_that_is_longer_is_not(
    spinning: Spinning, length: int, spins: int
) -> None:
    """A receive of heads asks for what may come together with them."""
    assert await spinning.spins(length) == spins


async def test_a_stream_that_is_expected_is_waited_for_in_pieces_until_then(spinning: Spinning) -> None:
    spinning.stream.stay_awake(0.1)
    async with spinning.receiving():
        while spinning.spinner.statistics().spins < 3:  # this task has its turn between the pieces
            await trio.lowlevel.checkpoint()
    assert spinning.spinner.statistics().spins <= 5


async def test_a_stream_that_does_not_come_as_expected_is_left_to_the_kernel(spinning: Spinning) -> None:
    spinning.stream.stay_awake(0.01)
    assert 3 <= await spinning.spins() <= 0.01 / 400e-6 + 1


async def test_nobody_is_waited_for_awake_while_other_streams_move_bytes(spinning: Spinning) -> None:
    spinning.stream.stay_awake(0.1)
    spinning.spinner.moved(object())
    assert await spinning.spins() == 0


async def test_a_stream_that_is_not_expected_soon_is_left_to_the_kernel_once(spinning: Spinning) -> None:
    spinning.stream.stay_awake(0)
    assert [await spinning.spins(), await spinning.spins()] == [0, 1]


class _Socket:
    """Nothing comes, or something at once; somebody else has the processor first."""

    def __init__(self, clock: SteppingClock) -> None:
        self._clock = clock
        self.away_s = 0.0
        self.comes = True
        self.count = 1

    def recv_into(self, view: memoryview, count: int, flags: int) -> int:
        self._clock.now += self.away_s
        if not self.comes:
            raise BlockingIOError
        return self.count


class Fixture(NamedTuple):
    """A spinner whose clock is read in no time, and its socket."""

    spinner: Spinner
    sock: _Socket

    def spins(self, chances: int) -> int:
        """Give it chances; return at how many it spun."""
        before = self.spinner.statistics().spins
        for _ in range(chances):
            self.spinner.moved(self.sock)
            self.spinner.spin(self.sock, cast("socket.socket", self.sock), [memoryview(bytearray(1))])
        return self.spinner.statistics().spins - before


def fixture(spin_us: Spin) -> Fixture:
    clock = SteppingClock(1e-6)
    spinner, sock = Spinner(spin_us, clock), _Socket(clock)
    spinner.moved(sock)
    clock.now += 0.1
    return Fixture(spinner, sock)


def test_a_spin_that_lost_the_processor_does_not_pay_although_something_came() -> None:
    one = fixture("adaptive")
    assert one.spins(100) == 100
    one.sock.away_s = 3e-3
    assert one.spins(1000) < 15
    fixed = fixture(400)
    fixed.sock.away_s = 3e-3
    assert fixed.spins(1000) == 1000


def test_copying_what_came_is_no_lost_processor() -> None:
    one = fixture("adaptive")
    one.sock.count, one.sock.away_s = 64 * 1024, 80e-6
    assert one.spins(100) == 100
    one.sock.away_s = 200e-6
    assert one.spins(100) < 10


def test_what_a_miss_cost_is_paid_by_those_that_pay_and_then_it_spins_at_each_chance() -> None:
    one = fixture("adaptive")
    one.sock.away_s = 3e-3
    one.spins(1)
    one.sock.away_s = 0.0
    assert one.spins(1 + 65) == 65
    one.sock.comes = False
    one.spins(1)
    one.sock.comes = True
    assert one.spins(1 + 100) == 100, "the debt was paid, so it skips one chance"


def test_misses_before_the_debt_is_paid_make_it_spin_at_ever_fewer_chances() -> None:
    one = fixture("adaptive")
    one.sock.comes = False
    assert one.spins(10_000) == 19  # with 1, 2, 4 ... chances between them, at most 1,024
    one.sock.comes = True
    assert one.spins(1024 + 100) >= 100
    assert one.spins(100) == 100


def test_a_chance_that_somebody_else_has_is_skipped_as_one_to_spin() -> None:
    one, other = fixture("adaptive"), fixture("adaptive")
    for each in (one, other):
        each.sock.comes = False
        assert each.spins(3) == 2
    skipped = 0
    while not one.spinner.chance(one.sock):
        one.spinner.moved(one.sock)
        skipped += 1
    assert other.spins(skipped) == 0
    assert other.spins(1) == one.spins(1) == 1


def test_a_spinner_that_is_off_never_spins() -> None:
    assert fixture("off").spins(10) == fixture(0).spins(10) == 0
    off = fixture("off")
    off.spinner.moved(off.sock)
    assert not off.spinner.chance(off.sock)


def test_a_fixed_time_skips_at_most_eight_chances() -> None:
    one = fixture(400)
    one.sock.comes = False
    assert one.spins(9_000) > 900
