"""Sockets under Trio: nothing is lost, nothing is left open, nobody starves."""

import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import pytest
import trio
import trio.testing

from infinistore.errors import ConfigError, StoreUnavailable
from infinistore.protocol.effects import SendDescriptors
from infinistore.transports.base import drive
from infinistore.transports.sockets.trio_streams import SocketStream, accept, connect_tcp, connect_unix, listen_tcp
from infinistore.transports.sockets.unix_listener import listen_unix

KIB = 1024
MIB = 1024 * 1024


Pair: TypeAlias = tuple[SocketStream, SocketStream]


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    left, right = map(SocketStream, socket.socketpair())
    yield left, right
    left.close()
    right.close()


def pattern(length: int) -> bytes:
    return (b"".join(number.to_bytes(4, "little") for number in range(length // 4 + 1)))[:length]


async def receive_exactly(stream: SocketStream, length: int) -> bytes:
    data = bytearray(length)
    received = 0
    while received < length:
        count = await stream.receive_into([memoryview(data)[received:]])
        assert count
        received += count
    return bytes(data)


async def test_more_views_than_one_system_call_takes_arrive_in_order(pair: Pair) -> None:
    left, right = pair
    data = pattern(64 * KIB)
    views = [memoryview(data)[start : start + 16] for start in range(0, len(data), 16)]
    assert len(views) == 4096
    async with trio.open_nursery() as nursery:
        nursery.start_soon(left.send_all, views)
        assert await receive_exactly(right, len(data)) == data


async def test_a_unix_socket_takes_more_than_by_default_while_nobody_reads(pair: Pair) -> None:
    plain, other = socket.socketpair()
    by_default = plain.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    left, right = pair
    taken = 0
    with suppress(BlockingIOError):
        while True:
            taken += left.socket.send(bytes(64 * KIB))
    assert taken > by_default
    assert await receive_exactly(right, taken) == bytes(taken)
    plain.close()
    other.close()


async def test_received_bytes_fill_the_views_from_the_front(pair: Pair) -> None:
    left, right = pair
    await left.send_all([memoryview(b"abcdef")])
    first, second = bytearray(4), bytearray(4)
    assert await right.receive_into([memoryview(first), memoryview(second)]) == 6
    assert bytes(first + second) == b"abcdef\0\0"


async def test_the_end_of_a_stream_is_zero_bytes_after_what_was_sent(pair: Pair) -> None:
    left, right = pair
    await left.send_all([memoryview(b"last")])
    await left.send_eof()
    assert await receive_exactly(right, 4) == b"last"
    assert await right.receive_into([memoryview(bytearray(4))]) == 0
    await right.send_all([memoryview(b"and back")])
    assert await receive_exactly(left, 8) == b"and back"


async def test_sending_to_a_peer_that_has_gone_is_an_error(pair: Pair) -> None:
    left, right = pair
    right.close()
    with pytest.raises(StoreUnavailable):
        await left.send_all([memoryview(bytes(MIB))])


async def test_closing_wakes_who_waits_on_either_side(pair: Pair) -> None:
    left, right = pair
    seen: list[object] = []

    async def receive(stream: SocketStream) -> None:
        try:
            seen.append(await stream.receive_into([memoryview(bytearray(1))]))
        except StoreUnavailable:
            seen.append(StoreUnavailable)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive, left)
            nursery.start_soon(receive, right)
            await trio.testing.wait_all_tasks_blocked()
            left.close()
    assert sorted(seen, key=str) == [0, StoreUnavailable]
    left.close()  # twice does no harm
    right.close()
    with pytest.raises(StoreUnavailable):
        await left.receive_into([memoryview(bytearray(1))])
    with pytest.raises(StoreUnavailable):
        await left.send_all([memoryview(b"x")])


async def test_a_cancelled_receive_loses_no_bytes(pair: Pair) -> None:
    """Cancelled at any time, what it has not returned is still there for the
    next one.
    """
    left, right = pair
    data = pattern(2 * MIB)
    received = bytearray()
    cancelled = 0

    async def send() -> None:
        await left.send_all([memoryview(data)])
        await left.send_eof()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        buffer = bytearray(64 * KIB)
        ended = False
        while not ended:
            # Cancelled from the start: the first checkpoint raises, and until then
            # bytes may move.
            with trio.CancelScope() as scope:
                scope.cancel()
                while True:
                    count = await right.receive_into([memoryview(buffer)])
                    received += buffer[:count]
                    if not count:
                        ended = True
                        break
            cancelled += scope.cancelled_caught
            await trio.lowlevel.checkpoint()
    assert cancelled
    assert received == data


async def test_a_busy_stream_lets_others_run(pair: Pair) -> None:
    left, right = pair
    others = 0
    done = False

    async def other() -> None:
        nonlocal others
        while not done:
            others += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        request, reply = memoryview(b"ping"), bytearray(4)
        for _ in range(1000):  # all of these succeed without waiting
            await left.send_all([request])
            await right.receive_into([memoryview(reply)])
        done = True
    assert others > 10


async def test_an_idle_stream_is_stale_when_the_peer_spoke_or_left(pair: Pair) -> None:
    left, right = pair
    assert not left.is_stale()
    await right.send_all([memoryview(b"unasked")])
    assert left.is_stale()
    assert await receive_exactly(left, 7) == b"unasked"
    assert not left.is_stale()
    right.close()
    assert left.is_stale()
    left.close()
    assert left.is_stale()


async def test_cancelling_a_connect_leaves_no_socket_open(tmp_path: Path) -> None:
    """An open socket that is forgotten is a ResourceWarning, which fails a test
    here.
    """
    listeners = [listen_unix(tmp_path / "socket"), *listen_tcp("127.0.0.1", 0)]
    port = listeners[1].getsockname()[1]
    for checkpoints in range(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_after, nursery, checkpoints)
            (await connect_unix(str(tmp_path / "socket"))).close()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_after, nursery, checkpoints)
            (await connect_tcp("127.0.0.1", port)).close()
    for listener in listeners:
        listener.close()


async def _cancel_after(nursery: trio.Nursery, checkpoints: int) -> None:
    for _ in range(checkpoints):
        await trio.lowlevel.checkpoint()
    nursery.cancel_scope.cancel()


async def test_cancelling_an_accept_leaves_no_socket_open(tmp_path: Path) -> None:
    listener = listen_unix(tmp_path / "socket")
    client = await connect_unix(str(tmp_path / "socket"))
    with trio.CancelScope() as scope:
        scope.cancel()
        (await accept(listener)).close()
    if scope.cancelled_caught:  # the connection waits on, or it was closed: the client is not left hanging
        listener.close()
        with trio.fail_after(60), suppress(StoreUnavailable):
            assert await client.receive_into([memoryview(bytearray(1))]) == 0
    listener.close()
    client.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_a_peer_that_vanishes_is_given_up_after_a_minute(host: str) -> None:
    try:
        (listener,) = listen_tcp(host, 0)
    except ConfigError:
        pytest.skip(f"this machine has no {host}")
    client = await connect_tcp(host, listener.getsockname()[1])
    served = await accept(listener)

    def option(stream: SocketStream, name: int) -> int:
        return int(stream.socket.getsockopt(socket.IPPROTO_TCP, name))

    for stream in (client, served):
        assert stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        probes_s = option(stream, socket.TCP_KEEPCNT) * option(stream, socket.TCP_KEEPINTVL)
        assert option(stream, socket.TCP_KEEPIDLE) + probes_s == 60
    # Bytes that nobody acknowledges. A client has its deadlines, and may wait longer
    # for a server that was stopped.
    assert option(served, socket.TCP_USER_TIMEOUT) == 60_000
    assert option(client, socket.TCP_USER_TIMEOUT) == 0
    for closed in (client, served, listener):
        closed.close()


async def test_a_closed_listener_ends_its_accept() -> None:
    (listener,) = listen_tcp("127.0.0.1", 0)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:

            async def wait() -> None:
                with pytest.raises(trio.ClosedResourceError):
                    await accept(listener)

            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            trio.lowlevel.notify_closing(listener)
            listener.close()
    with pytest.raises(trio.ClosedResourceError):  # the same for who comes later
        await accept(listener)


async def test_a_wait_is_given_up_at_its_deadline_and_the_stream_goes_on(
    autojump_clock: trio.testing.MockClock, pair: Pair
) -> None:
    left, right = pair
    start = trio.current_time()
    with pytest.raises(TimeoutError):
        await right.receive_into([memoryview(bytearray(1))], start + 5)
    assert trio.current_time() == start + 5
    with pytest.raises(TimeoutError):
        await left.send_all([memoryview(bytes(64 * MIB))], 3)
    assert trio.current_time() == start + 8
    left.close()
    assert await right.receive_into([memoryview(bytearray(1))], start + 9) == 1


async def test_descriptors_that_are_not_taken_in_time_are_given_up_like_bytes(
    autojump_clock: trio.testing.MockClock, pair: Pair
) -> None:
    left, right = pair
    with pytest.raises(TimeoutError):
        await left.send_all([memoryview(bytes(64 * MIB))], 5)
    with pytest.raises(TimeoutError):
        await left.send_descriptors([memoryview(b"x")], [right.socket.fileno()], 5)
    with pytest.raises(TimeoutError):
        await drive(descriptors_beside(b"x", right.socket.fileno()), left, within_s=5)
    with pytest.raises(TimeoutError):
        await left.receive_descriptors([memoryview(bytearray(1))], [], trio.current_time() + 5)
    assert trio.current_time() == 20


async def descriptors_beside(data: bytes, descriptor: int) -> None:
    await SendDescriptors([memoryview(data)], [descriptor])
