"""One task that looks at the sockets of many: it wakes them for what it cannot deal
with, and for nothing else.
"""

import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from infinistore.errors import StoreUnavailable
from infinistore.transports.sockets.spin import Spinner
from infinistore.transports.sockets.trio_streams import ReadySockets, SocketStream


@asynccontextmanager
async def looked_at() -> AsyncIterator[ReadySockets]:
    """Sockets that somebody looks at."""
    ready = ReadySockets()
    async with trio.open_nursery() as nursery:
        await nursery.start(ready.run)
        yield ready
        nursery.cancel_scope.cancel()


def pair(ready: ReadySockets, spinner: Spinner | None = None) -> tuple[SocketStream, socket.socket]:
    """A stream that is looked at, and the other end."""
    left, right = socket.socketpair()
    stream = SocketStream(left, spinner)
    stream.ready = ready
    return stream, right


class Reactions:
    """What came, and what is answered."""

    def __init__(self, stream: SocketStream, wake_at: bytes = b"", expected_s: float | None = None) -> None:
        self.buffer = bytearray(100)
        self.views = [memoryview(self.buffer)]
        self.seen: list[bytes] = []
        self._stream = stream
        self._wake_at = wake_at
        self._expected_s = expected_s
        self._changed = trio.Event()

    def __call__(self, count: int) -> int | None:
        data = bytes(self.buffer[:count])
        self.seen.append(data)
        if self._expected_s is not None:
            self._stream.stay_awake(self._expected_s)
        self._changed.set()
        if data == self._wake_at:
            return 1000
        if data == b"bug":
            raise RuntimeError("a bug")
        return None

    async def receive(self) -> int:
        try:
            return await self._stream.receive_or_react(self.views, self)
        finally:
            self._changed.set()

    async def until(self, act: Callable[[], object]) -> None:
        """Do something, and wait until something has come of it."""
        self._changed = trio.Event()
        act()
        with trio.fail_after(60):
            await self._changed.wait()
        await trio.testing.wait_all_tasks_blocked()

    async def send(self, peer: socket.socket, data: bytes) -> None:
        await self.until(lambda: peer.send(data))


async def test_a_task_is_woken_for_what_is_not_dealt_with_alone() -> None:
    async with looked_at() as ready, trio.open_nursery() as nursery:
        stream, peer = pair(ready)
        reactions = Reactions(stream, wake_at=b"wake")
        results: list[int] = []

        async def wait() -> None:
            results.append(await reactions.receive())

        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        for data in (b"one", b"two", b"wake"):
            assert not results
            await reactions.send(peer, data)
        assert results == [1000]
        assert reactions.seen == [b"one", b"two", b"wake"]
        nursery.start_soon(wait)  # and again
        await trio.testing.wait_all_tasks_blocked()
        await reactions.until(peer.close)
        assert results == [1000, 0], "the end of the stream"
        stream.close()


async def test_an_error_of_one_is_nobody_elses() -> None:
    async with looked_at() as ready, trio.open_nursery() as nursery:
        streams = [pair(ready) for _ in range(3)]
        reactions = [Reactions(stream, wake_at=b"wake") for stream, _ in streams]
        results: list[object] = [None] * 3

        async def wait(number: int) -> None:
            try:
                results[number] = await reactions[number].receive()
            except (RuntimeError, StoreUnavailable) as error:
                results[number] = error

        for number in range(3):
            nursery.start_soon(wait, number)
        await trio.testing.wait_all_tasks_blocked()
        await reactions[0].send(streams[0][1], b"bug")
        assert isinstance(results[0], RuntimeError)
        await reactions[1].until(streams[1][0].close)
        assert isinstance(results[1], StoreUnavailable)
        assert "closed on this side" in str(results[1])
        await reactions[2].send(streams[2][1], b"wake")
        assert results[2] == 1000
        for stream, peer in streams:
            stream.close()
            peer.close()


async def test_a_connection_that_breaks_is_an_unavailable_store() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()) as peer:
        stream = SocketStream(listener.accept()[0])
        async with looked_at() as ready, trio.open_nursery() as nursery:
            stream.ready = ready

            async def wait() -> None:
                with pytest.raises(StoreUnavailable, match="the connection broke: Connection reset"):
                    await Reactions(stream).receive()

            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            peer.close()
        stream.close()


async def test_a_cancelled_wait_loses_no_bytes_and_another_may_follow() -> None:
    async with looked_at() as ready:
        stream, peer = pair(ready)
        reactions = Reactions(stream, wake_at=b"wake")
        for _ in range(3):
            with trio.move_on_after(0.01):  # real time: nothing comes
                await reactions.receive()
        peer.send(b"wake")
        assert await reactions.receive() == 1000
        stream.close()
        peer.close()


async def test_sockets_that_are_always_ready_leave_others_their_turn() -> None:
    async with looked_at() as ready, trio.open_nursery() as nursery:
        turns = 0

        async def take_turns() -> None:
            nonlocal turns
            while True:
                await trio.lowlevel.checkpoint()
                turns += 1

        streams = [pair(ready) for _ in range(4)]
        received = 0
        for stream, peer in streams:

            def react(count: int, peer: socket.socket = peer) -> int | None:
                nonlocal received
                received += 1
                if received == 1000:
                    nursery.cancel_scope.cancel()
                peer.send(b"more")
                return None

            nursery.start_soon(stream.receive_or_react, [memoryview(bytearray(9))], react)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(take_turns)
        for _, peer in streams:
            peer.send(b"first")
        await trio.sleep_forever()
    assert 1000 <= received <= 1032
    assert turns >= 20
    for stream, peer in streams:
        stream.close()
        peer.close()


@pytest.mark.parametrize(("expected_s", "spins"), [(None, 1), (0.0, 0), (2e-3, 5)])
async def test_who_is_alone_is_woken_to_wait_awake_as_long_as_it_says(expected_s: float | None, spins: int) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 10e-6
        return now

    spinner = Spinner(400, clock)
    async with looked_at() as ready, trio.open_nursery() as nursery:
        stream, peer = pair(ready, spinner)
        reactions = Reactions(stream, expected_s=expected_s)
        nursery.start_soon(reactions.receive)
        await trio.testing.wait_all_tasks_blocked()
        for number, pause_s in enumerate((0.0, 1e-3, 1e-3)):
            now += pause_s
            assert spinner.statistics().spins == 0, "not alone for long enough"
            await reactions.send(peer, b"%d" % number)
        assert spinner.statistics().spins == spins
        assert reactions.seen == [b"0", b"1", b"2"]
        now += 10e-3
        await reactions.send(peer, b"3")
        assert spinner.statistics().spins == spins, "nothing came for long"
        nursery.cancel_scope.cancel()
    stream.close()
    peer.close()


async def test_sockets_that_nobody_looks_at_are_waited_for_as_usual() -> None:
    stream, peer = pair(ReadySockets())
    peer.send(b"data")
    assert await Reactions(stream, wake_at=b"data").receive() == 1000
    stream.close()
    peer.close()


@pytest.mark.parametrize("close", [lambda ready, stream: stream.close(), lambda ready, stream: None])
async def test_waits_end_when_nobody_looks_any_more(close: Callable[[ReadySockets, SocketStream], None]) -> None:
    ready = ReadySockets()
    async with trio.open_nursery() as nursery:
        looking = trio.CancelScope()

        async def look() -> None:
            with looking:
                await ready.run()

        nursery.start_soon(look)
        await trio.testing.wait_all_tasks_blocked()
        stream, peer = pair(ready)

        async def wait() -> None:
            with pytest.raises(StoreUnavailable, match="closed on this side"):
                await Reactions(stream).receive()

        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        close(ready, stream)
        looking.cancel()
    stream.close()
    peer.close()
