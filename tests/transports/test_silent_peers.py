"""A stream asks after a peer that neither sends nor takes anything, again and again,
until it hears that the peer is gone.
"""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

from infinistore.errors import StoreUnavailable
from infinistore.transports.sockets.asyncio_streams import AsyncioSocketStream
from infinistore.transports.sockets.blocking_streams import BlockingSocketStream
from infinistore.transports.sockets.spin import Spinner
from infinistore.transports.sockets.trio_streams import SocketStream

RECEIVE = "receive_into", [memoryview(bytearray(1))]
SEND = "send_all", [memoryview(bytes(64 << 20))]
FAR_S = 1e6


class Asked:
    """What asks; the third time it learns that the peer is gone."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1
        if self.times == 3:
            raise StoreUnavailable("gone")

    async def asynchronously(self) -> None:
        self()


def by_threads(sock: socket.socket, use: Callable[[Any], Any], asked: Asked) -> None:
    stream = BlockingSocketStream(sock)
    stream.deadline = time.monotonic() + FAR_S  # real time: never reached
    stream.silence_s, stream.ask = 0.0, asked
    use(stream)


def by_trio(sock: socket.socket, use: Callable[[Any], Awaitable[Any]], asked: Asked) -> None:
    async def main() -> None:
        stream = SocketStream(sock)
        stream.silence_s, stream.ask = 0.0, asked.asynchronously
        await use(stream)

    trio.run(main)


def by_asyncio(sock: socket.socket, use: Callable[[Any], Awaitable[Any]], asked: Asked) -> None:
    async def main() -> None:
        stream = AsyncioSocketStream(sock, Spinner(0))
        stream.silence_s, stream.ask = 0.0, asked.asynchronously
        await use(stream)

    asyncio.run(main())


@pytest.mark.parametrize("run", [by_threads, by_trio, by_asyncio])
@pytest.mark.parametrize(("method", "views"), [RECEIVE, SEND], ids=["receive", "send"])
def test_a_silent_peer_is_asked_until_it_is_gone(
    run: Callable[..., None], method: str, views: list[memoryview]
) -> None:
    left, right = socket.socketpair()
    asked = Asked()
    with left, right, pytest.raises(StoreUnavailable, match="gone"):
        run(left, lambda stream: getattr(stream, method)(views), asked)
    assert asked.times == 3


@pytest.mark.parametrize("run", [by_threads, by_trio, by_asyncio])
def test_a_peer_that_sends_is_not_asked(run: Callable[..., None]) -> None:
    left, right = socket.socketpair()
    right.send(b"x")
    asked = Asked()
    with left, right:
        run(left, lambda stream: stream.receive_into(RECEIVE[1]), asked)
    assert not asked.times
