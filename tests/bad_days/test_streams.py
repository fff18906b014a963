"""What streams do where the network is neither good nor gone."""

import asyncio
import errno
import math
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from infinistore.errors import StoreUnavailable
from infinistore.transports.sockets.asyncio_streams import AsyncioSocketStream
from infinistore.transports.sockets.blocking_streams import BlockingSocketStream
from infinistore.transports.sockets.spin import Spinner

KIB, MIB = 1024, 1024 * 1024


class Tireless(socket.socket):
    """Always has bytes, and takes all of them at once."""

    calls = 0

    def recv_into(self, buffer: Any, *_: Any) -> int:
        self.calls += 1
        return len(buffer)

    def send(self, view: Any, *_: Any) -> int:
        self.calls += 1
        return len(view)

    def sendmsg(self, views: Any, *_: Any) -> int:
        self.calls += 1
        return sum(map(len, views))


@pytest.fixture
def tireless() -> Iterator[Tireless]:
    with Tireless(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        yield sock


@pytest.mark.parametrize(("sends", "size"), [(False, MIB), (True, MIB), (True, 100)])
def test_a_peer_that_is_always_ready_does_not_keep_asyncio_from_its_deadline(
    tireless: Tireless, sends: bool, size: int
) -> None:
    view = memoryview(bytearray(size))

    async def transfer() -> None:
        stream = AsyncioSocketStream(tireless, Spinner(0))
        async with asyncio.timeout(0):
            while tireless.calls < 1000:
                if sends:
                    await stream.send_all([view])
                else:
                    await stream.receive_into([view])

    with pytest.raises(TimeoutError):
        asyncio.run(transfer())
    assert tireless.calls < 200


def test_a_connection_that_the_network_gave_up_is_broken_not_late() -> None:
    """The system's ETIMEDOUT is a `TimeoutError` to Python, but no deadline of ours."""

    class GivenUp(socket.socket):
        def recv_into(self, *_: Any) -> int:
            raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

        send = sendmsg = recv_into

    with GivenUp(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        stream = BlockingSocketStream(sock)
        stream.deadline = 1e9  # in thirty years
        with pytest.raises(StoreUnavailable, match="Connection timed out"):
            stream.receive_into([memoryview(bytearray(1))])
        with pytest.raises(StoreUnavailable, match="Connection timed out"):
            stream.send_all([memoryview(bytearray(1))])


@pytest.mark.parametrize("deadline_s", [0.2, 1.2])
@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET])
def test_a_reader_that_takes_a_little_now_and_then_does_not_stretch_the_deadline_of_a_send(
    family: int, deadline_s: float
) -> None:
    """The kernel's own timeout begins anew with each piece that it puts into a Unix
    socket. The reader takes eight seconds for all at the least: then nothing is late.
    """
    ours, theirs = _pair(family)
    over = threading.Event()

    def read_slowly() -> None:
        with suppress(OSError):
            while not over.wait(0.008):  # real time: a pause, however long
                theirs.recv(32 * KIB)

    thread = threading.Thread(target=read_slowly)
    thread.start()
    try:
        stream = BlockingSocketStream(ours)
        stream.deadline = time.monotonic() + deadline_s  # real time: the reader takes far longer
        with pytest.raises(TimeoutError):
            stream.send_all([memoryview(bytes(1000 * 32 * KIB))])
    finally:
        over.set()
        ours.close()  # the reader may wait for what was never sent
        thread.join()
        theirs.close()


def _pair(family: int) -> tuple[socket.socket, socket.socket]:
    if family == socket.AF_UNIX:
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


class Clock:
    """Time that passes only in `poll`, which waits for whole milliseconds, and in which
    nothing ever becomes ready.
    """

    now = 1000.0
    waits = 0

    def register(self, *_: Any) -> None:
        """Nothing is ever ready."""

    def poll(self, milliseconds: float) -> list[Any]:
        assert 0 < milliseconds < 2**31  # else poll raises OverflowError, or waits for ever
        self.waits += 1
        self.now += math.ceil(milliseconds) / 1000
        return []


class Busy(socket.socket):
    """Never ready."""

    def recv_into(self, *_: Any) -> int:
        raise BlockingIOError

    send = sendmsg = recv_into


@pytest.mark.parametrize("deadline_s", [0.001, 0.01, 0.25, 1.0, 30.0, 3600.0, 1e5])
@pytest.mark.parametrize("sends", [False, True])
def test_a_wait_ends_with_the_deadline_however_far_that_is(
    deadline_s: float, sends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(select, "poll", lambda: clock)
    with Busy(socket.AF_INET, socket.SOCK_STREAM) as sock:
        stream = BlockingSocketStream(sock, spin_us=0)
        stream.deadline = clock.now + deadline_s
        with pytest.raises(TimeoutError):
            stream.send_all([memoryview(b"x")]) if sends else stream.receive_into([memoryview(bytearray(1))])
        assert 0 <= clock.now - stream.deadline <= 0.001
        assert clock.waits <= 30  # it is woken now and then, not all the time
