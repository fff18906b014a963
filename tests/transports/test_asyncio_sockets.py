"""Sockets under asyncio: as under Trio, nothing is lost and nothing is left behind."""

import asyncio
import socket
from pathlib import Path

import pytest

from infinistore.errors import StoreUnavailable
from infinistore.transports.sockets.asyncio_streams import AsyncioSocketStream, connect_tcp, connect_unix
from infinistore.transports.sockets.spin import Spinner
from infinistore.transports.sockets.trio_streams import listen_tcp
from infinistore.transports.sockets.unix_listener import listen_unix

KIB = 1024
MIB = 1024 * 1024


def pair() -> tuple[AsyncioSocketStream, AsyncioSocketStream]:
    left, right = socket.socketpair()
    return AsyncioSocketStream(left, Spinner()), AsyncioSocketStream(right, Spinner())


def test_more_views_than_one_system_call_takes_arrive_in_order() -> None:
    async def main() -> None:
        left, right = pair()
        data = b"".join(number.to_bytes(4, "little") for number in range(16 * KIB))
        views = [memoryview(data)[start : start + 16] for start in range(0, len(data), 16)]
        sending = asyncio.create_task(left.send_all(views))
        received = bytearray()
        while len(received) < len(data):
            first, second = bytearray(1000), bytearray(1000)
            count = await right.receive_into([memoryview(first), memoryview(second)])
            received += (first + second)[:count]
        await sending
        assert received == data
        left.close()
        assert await right.receive_into([memoryview(bytearray(1))]) == 0
        with pytest.raises(StoreUnavailable):
            await right.send_all([memoryview(data)] * 100)
        right.close()

    asyncio.run(main())


def test_a_cancelled_receive_loses_no_bytes() -> None:
    async def main() -> None:
        left, right = pair()
        data = b"".join(number.to_bytes(4, "little") for number in range(2 * MIB))
        received = bytearray()
        sending = asyncio.create_task(left.send_all([memoryview(data)]))

        async def receive() -> None:
            nonlocal received
            buffer = bytearray(64 * KIB)
            while len(received) < len(data):
                count = await right.receive_into([memoryview(buffer)])
                received += buffer[:count]

        cancelled = 0
        while len(received) < len(data):
            task = asyncio.create_task(receive())
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            cancelled += task.cancelled()
            await asyncio.sleep(0)
        await sending
        assert cancelled
        assert received == data
        left.close()
        right.close()

    asyncio.run(main())


def test_cancelling_a_connect_leaves_no_socket_open(tmp_path: Path) -> None:
    """An open socket that is forgotten is a ResourceWarning, which fails a test
    here.
    """
    listeners = [listen_unix(tmp_path / "socket"), *listen_tcp("127.0.0.1", 0)]
    port = listeners[1].getsockname()[1]

    async def unix() -> None:
        (await connect_unix(str(tmp_path / "socket"), Spinner())).close()

    async def tcp() -> None:
        (await connect_tcp("127.0.0.1", port, Spinner())).close()

    async def main() -> None:
        for connect in (unix, tcp):
            for steps in range(10):
                task = asyncio.create_task(connect())
                for _ in range(steps):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])

    asyncio.run(main())
    for listener in listeners:
        listener.close()


def test_closing_a_stream_of_a_loop_that_is_over_does_no_harm() -> None:
    left, right = pair()

    async def use() -> None:
        await left.send_all([memoryview(b"abc")])
        assert await right.receive_into([memoryview(bytearray(3))]) == 3

    asyncio.run(use())
    asyncio.run(use())
    left.close()
    assert right.is_stale()
    right.close()
