"""How a server ends: requests under way finish, idle connections close, and nobody
keeps it for ever. Where the clock stands still, nothing ends because its time is over.
"""

import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.lowlevel
import trio.testing
from trio.testing import MockClock

from infinistore.errors import StoreUnavailable
from infinistore.protocol.codec import encode_head, pack_u64
from infinistore.protocol.messages import Get, GetReply, Keys, Lease, Put, PutReply, Release, Reserve, Statistics
from infinistore.server import serve
from infinistore.transports.base import drive
from infinistore.transports.sockets.trio_streams import SocketStream, connect_tcp
from tests.server.running import (
    KIB,
    MIB,
    Peer,
    RunningServer,
    let_linger,
    make_config,
    running_server,
    simulated_server,
    until,
)

SLOW = Put(Keys(["slow", "too"]), pack_u64([500, 500]), checksums=False)
"""Of two blocks, so that it has room before it comes."""


@pytest.fixture
async def server() -> AsyncIterator[RunningServer]:
    async with simulated_server() as server:
        yield server


async def test_idle_connections_are_closed_at_once(server: RunningServer, mock_clock: MockClock) -> None:
    peers = [await server.peer() for _ in range(5)]
    strangers = [await server.stranger() for _ in range(5)]
    await trio.testing.wait_all_tasks_blocked()
    server.server.drain()
    await server.finished.wait()
    for peer in (*peers, *strangers):
        assert await peer.is_closed()
        peer.close()
    assert server.core.statistics().clients == 0


async def test_a_put_under_way_is_finished_and_its_connection_then_closed(
    server: RunningServer, peer: Peer, mock_clock: MockClock
) -> None:
    await peer.send_head(SLOW, payload_bytes=1000)
    await trio.testing.wait_all_tasks_blocked()
    server.server.drain()
    await trio.testing.wait_all_tasks_blocked()
    assert not server.finished.is_set()
    await peer.send(bytes(1000))
    assert isinstance(await peer.reply_to_half(SLOW), PutReply)
    await server.finished.wait()
    assert await peer.is_closed()
    assert server.core.exists(["slow"]) == b"\1"


async def test_a_get_under_way_is_finished(server: RunningServer, mock_clock: MockClock) -> None:
    peer = await server.peer()
    value = bytes(range(256)) * 8 * KIB
    await peer.ask(Put(Keys(["large"]), pack_u64([len(value)]), checksums=False), value)
    await peer.send_head(Get(Keys(["large"]), pack_u64(), checksums=False))
    await trio.testing.wait_all_tasks_blocked()
    server.server.drain()
    await trio.testing.wait_all_tasks_blocked()
    assert not server.finished.is_set()
    assert isinstance(await peer.reply_to_half(Get(Keys(["large"]), pack_u64())), GetReply)
    assert await peer.payload() == value
    await server.finished.wait()


LARGE = bytes(range(256)) * 256
GET_LARGE = Get(Keys(["large"]), pack_u64([len(LARGE)]), checksums=False)


async def pipelining(server: RunningServer, count: int) -> Peer:
    """A client that has asked for a large block so many times, and reads nothing."""
    peer = await server.peer()
    await peer.ask(Put(Keys(["large"]), pack_u64([len(LARGE)]), checksums=False), LARGE)
    for _ in range(count):
        await peer.send_head(GET_LARGE)
    return peer


async def rest(peer: Peer) -> bytes:
    """What comes until the end; raises where it is torn off."""
    answers = bytearray()
    buffer = memoryview(bytearray(MIB))
    while count := await peer.stream.receive_into([buffer]):
        answers += buffer[:count]
    return bytes(answers)


async def test_a_request_that_comes_with_the_end_takes_no_answer_away(mock_clock: MockClock) -> None:
    async with running_server(make_config()) as server:
        peer = await pipelining(server, 20)
        statistics = server.server.context.recorder.statistics
        await until(lambda: any(one.kind == "get" and one.count == 20 for one in statistics()))
        await trio.testing.wait_all_tasks_blocked()  # most answers are in the server's kernel buffer: nobody reads
        (session,) = server.server.sessions
        assert isinstance(peer.stream, SocketStream)
        peer.stream.socket.send(encode_head(GET_LARGE, request_id=1))
        session.finish()  # before its task sees that
        answers = await rest(peer)
    assert answers.count(LARGE) == 20


async def test_who_has_sent_more_gets_whole_answers_and_then_the_end(mock_clock: MockClock) -> None:
    async with running_server(make_config()) as server:
        peer = await pipelining(server, 500)
        statistics = server.server.context.recorder.statistics
        await until(lambda: any(one.kind == "get" and one.count >= 3 for one in statistics()))  # none is read yet
        server.server.drain()
        await trio.lowlevel.checkpoint()
        answers = await rest(peer)
        assert 3 <= answers.count(LARGE) < 500
        assert answers.endswith(LARGE)
        peer.close()
        await server.finished.wait()


async def test_what_is_not_finished_in_time_is_given_up(autojump_clock: MockClock) -> None:
    async with simulated_server(make_config(drain_timeout_s=3)) as server:
        peer = await server.peer()
        await peer.send_head(SLOW, payload_bytes=1000)
        await trio.testing.wait_all_tasks_blocked()
        start = trio.current_time()
        server.server.drain()
        await server.finished.wait()
        assert trio.current_time() - start <= 3.1
        assert server.core.statistics().reserved_bytes == 0
        assert server.core.statistics().clients == 0
        assert await peer.is_closed()


async def test_nobody_gets_in_while_the_server_drains(autojump_clock: MockClock) -> None:
    async with simulated_server(make_config(drain_timeout_s=30)) as server:
        busy = await server.peer()
        await busy.send_head(SLOW, payload_bytes=1000)
        await trio.testing.wait_all_tasks_blocked()
        server.server.drain()
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(StoreUnavailable):
            await server.connect()
        busy.close()
        with trio.fail_after(20):
            await server.finished.wait()


@pytest.mark.parametrize("held", ["spare room", "room", "a lease", "a lease, in quarantine"])
async def test_a_client_that_holds_something_and_says_nothing_does_not_keep_the_server(
    held: str, tmp_path: Path, mock_clock: MockClock
) -> None:
    """But as long as anything is under way nobody gets its room, where it may still
    write.
    """
    config = make_config(unix_socket=str(tmp_path / "socket"), drain_timeout_s=3600)
    async with running_server(config) as server:
        silent, busy = await server.local_peer(), await server.peer()
        await busy.ask(Put(Keys(["key"]), pack_u64([KIB]), checksums=False), bytes(KIB))
        if "lease" in held:
            await silent.ask(Lease(Keys(["key"]), pack_u64()))
        else:
            await silent.ask(Reserve(pack_u64([KIB]), spare=held == "spare room"))
        if "quarantine" in held:
            await drive(silent.connection.notify(Release(12345)), silent.stream)
            await let_linger(silent, mock_clock)
            await server.until(quarantined_bytes=KIB)
        await busy.send_head(SLOW, payload_bytes=1000)
        await server.until(reservations=1 if "lease" in held else 2)
        server.server.drain()
        await server.until(quarantined_bytes=KIB)
        assert not server.ended
        await busy.send(bytes(1000))
        assert isinstance(await busy.reply_to_half(SLOW), PutReply)
        await let_linger(busy, mock_clock)
        await server.finished.wait()
        silent.close()


@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("kind", ["sockets", "memory"])
async def test_who_connects_at_the_moment_of_the_drain_does_not_keep_the_server(steps: int, kind: str) -> None:
    """Accepted just before or after, greeted or not: it goes with the idle ones."""
    config = make_config(drain_timeout_s=3600)
    async with (running_server if kind == "sockets" else simulated_server)(config) as server:
        peer = await server.stranger()
        for _ in range(steps):
            await trio.lowlevel.checkpoint()
        server.server.drain()
        await server.quiet()
        with suppress(StoreUnavailable):
            assert await peer.is_closed()
        await server.finished.wait()


async def test_pipelined_requests_are_not_begun_after_the_one_under_way(
    server: RunningServer, peer: Peer, autojump_clock: MockClock
) -> None:
    await peer.send_head(SLOW, payload_bytes=1000)
    await trio.testing.wait_all_tasks_blocked()
    server.server.drain()
    await peer.send(bytes(1000))
    await peer.send_head(Statistics())
    assert isinstance(await peer.reply_to_half(SLOW), PutReply)
    await server.finished.wait()


# Signals


async def peer_of_program(nursery: trio.Nursery) -> Peer:
    """A client of a server that handles signals."""
    addresses = await nursery.start(partial(serve, make_config(drain_timeout_s=3600), handle_signals=True))
    peer = Peer(await connect_tcp("127.0.0.1", addresses.port))
    await peer.hello()
    return peer


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains(number: signal.Signals) -> None:
    async with trio.open_nursery() as nursery:
        peer = await peer_of_program(nursery)
        await peer.send_head(SLOW, payload_bytes=1000)
        await peer.send(bytes(500))
        await trio.testing.wait_all_tasks_blocked()
        signal.raise_signal(number)
        await trio.testing.wait_all_tasks_blocked()
        await peer.send(bytes(500))
        assert isinstance(await peer.reply_to_half(SLOW), PutReply)
        assert await peer.is_closed()
        peer.close()


async def test_a_second_signal_does_not_wait_for_requests_under_way() -> None:
    async with trio.open_nursery() as nursery:
        peer = await peer_of_program(nursery)
        await peer.send_head(Put(Keys(["slow"]), pack_u64([MIB]), checksums=False), payload_bytes=MIB)
        await trio.testing.wait_all_tasks_blocked()
        signal.raise_signal(signal.SIGTERM)
        await trio.testing.wait_all_tasks_blocked()
        signal.raise_signal(signal.SIGTERM)
        with suppress(StoreUnavailable):  # bytes that nobody read may reset the connection
            assert await peer.is_closed()
        peer.close()
