"""What streams do where the network is neither good nor gone."""

import asyncio
import errno
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from infinistore.errors import StoreUnavailable
from infinistore.transports.asyncio_sockets import AsyncioSocketStream
from infinistore.transports.blocking_sockets import BlockingSocketStream
from infinistore.transports.spin import Spinner

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
        stream.deadline = time.monotonic() + 60
        with pytest.raises(StoreUnavailable, match="Connection timed out"):
            stream.receive_into([memoryview(bytearray(1))])
        with pytest.raises(StoreUnavailable, match="Connection timed out"):
            stream.send_all([memoryview(bytearray(1))])


@pytest.mark.parametrize("deadline_s", [0.2, 1.2])
@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET])
def test_a_reader_that_takes_a_little_now_and_then_does_not_stretch_the_deadline_of_a_send(
    family: int, deadline_s: float
) -> None:
    """The kernel's own timeout begins anew with each piece that it puts into a Unix socket."""
    ours, theirs = _pair(family)
    over = threading.Event()

    def read_slowly() -> None:
        with suppress(OSError):
            while not over.wait(0.008):
                theirs.recv(32 * KIB)

    thread = threading.Thread(target=read_slowly)
    thread.start()
    try:
        stream = BlockingSocketStream(ours)
        started = time.monotonic()
        stream.deadline = started + deadline_s
        with pytest.raises(TimeoutError):
            stream.send_all([memoryview(bytes(64 * MIB))])
        assert time.monotonic() - started < deadline_s + 1
    finally:
        over.set()
        thread.join()
        ours.close()
        theirs.close()


def _pair(family: int) -> tuple[socket.socket, socket.socket]:
    if family == socket.AF_UNIX:
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


class Coarse(socket.socket):
    """A socket whose timeouts the kernel rounds up, as Linux does: to 4 ms, and to an eighth when they are longer.

    Time passes only in it.
    """

    now = 1000.0
    waits = 0

    def setsockopt(self, level: int, option: int, value: Any, *rest: Any) -> None:
        if level == socket.SOL_SOCKET and option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            seconds, micros = struct.unpack("@ll", value)
            self.timeout_s = seconds + micros / 1e6
        else:
            super().setsockopt(level, option, value, *rest)

    def _wait(self, *_: Any) -> int:
        self.waits += 1
        self.now += max(0.008, self.timeout_s * 9 / 8)
        raise BlockingIOError

    def send(self, *_: Any) -> int:
        raise BlockingIOError  # what does not wait takes no time

    recv_into = _wait  # type: ignore[assignment]
    sendmsg = _wait


@pytest.mark.parametrize("deadline_s", [0.001, 0.01, 0.25, 1.0, 30.0, 3600.0, 1e9])
@pytest.mark.parametrize("sends", [False, True])
def test_a_kernel_that_rounds_timeouts_up_does_not_stretch_a_deadline(
    deadline_s: float, sends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Coarse(socket.AF_INET, socket.SOCK_STREAM) as sock:
        monkeypatch.setattr(time, "monotonic", lambda: sock.now)
        stream = BlockingSocketStream(sock, spin_s=0)
        stream.deadline = sock.now + deadline_s
        with pytest.raises(TimeoutError):
            stream.send_all([memoryview(b"x")]) if sends else stream.receive_into([memoryview(bytearray(1))])
        assert 0 <= sock.now - stream.deadline <= 0.016
        assert sock.waits <= 15  # it is woken now and then, not all the time
