"""Waiting awake: it is short, it is for a stream that is alone, and others have their
turn meanwhile.
"""

import socket

import trio
import trio.testing

from infinistore.transports.sockets.spin import Spinner
from infinistore.transports.sockets.trio_streams import SocketStream

STEP_S = 50e-6


class SteppingClock:
    """Every look at it takes as long."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += STEP_S
        return self.now


def spinning_pair() -> tuple[SocketStream, SocketStream, Spinner]:
    """A stream that has been alone for long, its peer, and what decides when the stream
    waits awake.
    """
    clock = SteppingClock()
    spinner = Spinner(400e-6, clock)
    left, right = socket.socketpair()
    stream = SocketStream(left, spinner)
    spinner.moved(stream)
    clock.now += 0.1
    spinner.moved(stream)
    return stream, SocketStream(right), spinner


async def test_a_stream_that_was_quick_is_waited_for_awake_once() -> None:
    stream, peer, spinner = spinning_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.receive_into, [memoryview(bytearray(1))])
        await trio.testing.wait_all_tasks_blocked()
        assert (spinner.statistics().spins, spinner.statistics().hits) == (1, 0)
        await peer.send_all([memoryview(b"x")])
    stream.close()
    peer.close()


async def test_a_stream_that_is_expected_is_waited_for_in_pieces_until_then() -> None:
    stream, peer, spinner = spinning_pair()
    stream.stay_awake(0.1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.receive_into, [memoryview(bytearray(1))])
        while spinner.statistics().spins < 3:  # this task has its turn between the pieces
            await trio.lowlevel.checkpoint()
        await peer.send_all([memoryview(b"x")])
    assert spinner.statistics().spins <= 5
    stream.close()
    peer.close()


async def test_a_stream_that_does_not_come_as_expected_is_left_to_the_kernel() -> None:
    stream, peer, spinner = spinning_pair()
    stream.stay_awake(0.01)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.receive_into, [memoryview(bytearray(1))])
        await trio.testing.wait_all_tasks_blocked()
        assert 3 <= spinner.statistics().spins <= 0.01 / 400e-6 + 1
        await peer.send_all([memoryview(b"x")])
    stream.close()
    peer.close()


async def test_nobody_is_waited_for_awake_while_other_streams_move_bytes() -> None:
    stream, peer, spinner = spinning_pair()
    stream.stay_awake(0.1)
    spinner.moved(object())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.receive_into, [memoryview(bytearray(1))])
        await trio.testing.wait_all_tasks_blocked()
        assert spinner.statistics().spins == 0
        await peer.send_all([memoryview(b"x")])
    stream.close()
    peer.close()


async def test_a_stream_that_is_not_expected_soon_is_left_to_the_kernel_once() -> None:
    stream, peer, spinner = spinning_pair()
    stream.stay_awake(0)
    for spins in (0, 1):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.receive_into, [memoryview(bytearray(1))])
            await trio.testing.wait_all_tasks_blocked()
            assert spinner.statistics().spins == spins
            await peer.send_all([memoryview(b"x")])
    stream.close()
    peer.close()
