"""Connections that never say who they are: they cost a server little, and its clients
nothing.
"""

import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import trio
import trio.testing
from trio.testing import MockClock

import infinistore
from infinistore.errors import AuthenticationFailed, LimitExceeded, StoreUnavailable
from infinistore.protocol.codec import encode_head, pack_u64
from infinistore.protocol.messages import Hello, Keys, Put, Statistics, StatisticsReply
from infinistore.server.budgets import LogBudget
from infinistore.server.session.handshake import MOST_STRANGERS
from infinistore.transports.base import Stream
from infinistore.transports.sockets.trio_streams import connect_tcp, connect_unix
from tests.server.http_client import ask
from tests.server.running import Peer, RunningServer, make_config, running_server, simulated_server

HELLO = encode_head(Hello("stranger"), request_id=1)


async def strangers(server: RunningServer, count: int, said: bytes = b"") -> list[Stream]:
    """Connections, accepted one after the other, that have said no more than this."""
    streams = []
    for _ in range(count):
        stream = await server.connect()
        if said:
            await stream.send_all([memoryview(said)])
        await trio.testing.wait_all_tasks_blocked()
        streams.append(stream)
    return streams


async def has_ended(stream: Stream) -> bool:
    """Whether the server has closed a connection, without a word."""
    ended: list[bool] = []

    async def look() -> None:
        ended.append(await stream.receive_into([memoryview(bytearray(1))]) == 0)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    return ended == [True]


@pytest.fixture
async def server() -> AsyncIterator[RunningServer]:
    async with simulated_server() as server:
        yield server


@pytest.mark.parametrize("said", [b"", HELLO[:1], HELLO[:-1]], ids=["nothing", "a byte", "nearly all of it"])
async def test_who_has_not_said_hello_takes_no_clients_place(said: bytes, mock_clock: MockClock) -> None:
    """The clock stands still: nobody waits for the strangers' ten seconds."""
    async with simulated_server(make_config(max_connections=3)) as server:
        silent = await strangers(server, 40, said)
        peers = [await server.peer() for _ in range(3)]
        over = await server.stranger()
        with pytest.raises(LimitExceeded, match="--max-connections"):
            await over.hello()
        statistics = server.server.telemetry.statistics()
        assert (statistics.connections_open, statistics.connections_refused) == (3, 1)
        assert (statistics.strangers_open, statistics.strangers_dropped) == (41, 0)
        assert server.core.statistics().clients == 3
        for stream in (*silent, over.stream, *(peer.stream for peer in peers)):
            stream.close()


async def test_the_oldest_stranger_goes_when_there_are_too_many(
    server: RunningServer, peer: Peer, mock_clock: MockClock
) -> None:
    silent = await strangers(server, MOST_STRANGERS + 3)
    assert [await has_ended(stream) for stream in silent] == [True] * 3 + [False] * MOST_STRANGERS
    assert isinstance(await peer.ask(Statistics()), StatisticsReply)
    statistics = server.server.telemetry.statistics()
    assert (statistics.strangers_open, statistics.strangers_dropped) == (MOST_STRANGERS, 3)
    late = Peer(silent[-1])
    await late.hello()
    assert server.server.telemetry.statistics().strangers_open == MOST_STRANGERS - 1
    for stream in (*silent, peer.stream):
        stream.close()


async def test_who_was_turned_away_and_does_not_leave_is_a_stranger_still(
    server: RunningServer, mock_clock: MockClock
) -> None:
    await strangers(server, MOST_STRANGERS, b"no hello at all, and longer than a header")
    assert server.server.telemetry.statistics().errors == MOST_STRANGERS
    await server.peer()
    assert server.server.telemetry.statistics().strangers_dropped == 1


async def test_strangers_leave_with_a_server_that_drains(server: RunningServer, mock_clock: MockClock) -> None:
    silent = await strangers(server, 5, HELLO[:40])
    server.server.drain()
    await server.finished.wait()
    assert all([await has_ended(stream) for stream in silent])


async def test_the_log_does_not_grow_with_every_stranger(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    caplog.set_level(logging.INFO)
    async with simulated_server() as server:
        for stream in await strangers(server, 300, b"GET / HTTP/1.1\r\n" * 4):
            stream.close()
        lines = len(caplog.records)
        assert 1 < lines < 30
        await trio.sleep(60)
        await strangers(server, 1, b"GET / HTTP/1.1\r\n" * 4)
        said = [record.__dict__.get("left_out", 0) for record in caplog.records]
        assert len(said) == lines + 1
        assert sum(said) + lines >= 300  # each is in the log, or counted in the next line


async def test_the_log_has_a_burst_of_each_tenant_and_then_one_line_a_second(
    caplog: pytest.LogCaptureFixture, mock_clock: MockClock
) -> None:
    caplog.set_level(logging.INFO)
    mock_clock.jump(7)
    budget = LogBudget()

    def said(count: int, **tenant: str) -> list[dict[str, object]]:
        caplog.clear()
        for _ in range(count):
            budget.log(logging.INFO, "said", why="because", **tenant)
        wanted = ("message", "why", "tenant", "left_out")
        return [{name: vars(line)[name] for name in wanted if name in vars(line)} for line in caplog.records]

    line = {"message": "said", "why": "because", "tenant": "a"}
    assert said(25, tenant="a") == [line] * 20
    assert said(1) == [{"message": "said", "why": "because"}]
    mock_clock.jump(3)
    assert said(5, tenant="a") == [{**line, "left_out": 5}, line, line]
    mock_clock.jump(1000)
    assert said(25, tenant="a") == [{**line, "left_out": 2}, *[line] * 19]


async def test_probes_are_answered_beside_strangers_while_a_server_drains(mock_clock: MockClock) -> None:
    """The clock stands still: no stranger makes room because its time is over."""
    async with running_server() as server:
        peer = await server.peer()
        await peer.send_head(Put(Keys(["slow"]), pack_u64([1000]), checksums=False), payload_bytes=1000)
        (address,) = server.server.addresses.management
        silent = [await connect_tcp(*address) for _ in range(80)]
        for stream in silent:
            with suppress(StoreUnavailable):
                await stream.send_all([memoryview(b"GET /healthz HTTP/1.1\r\n")])
        server.server.drain()
        assert (await ask(address, "GET", "/healthz")).status == 200
        assert (await ask(address, "GET", "/readyz")).json == {"state": "draining"}
        await peer.send(bytes(1000))
        for left in (*silent, peer.stream):
            left.close()


@asynccontextmanager
async def listening(kind: str, folder: Path) -> AsyncGenerator[tuple[RunningServer, str]]:
    """A server on real sockets, and the URL of one of them."""
    if kind == "unix":
        path = folder / "socket"
        async with running_server(make_config(unix_socket=str(path))) as server:
            yield server, f"unix://{path}"
    else:
        host = "::1" if kind == "IPv6" else "127.0.0.1"
        try:
            socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
        except OSError:
            pytest.skip(f"this machine has no {kind}")
        async with running_server(make_config(host=host)) as server:
            yield server, f"tcp://{f'[{host}]' if ':' in host else host}:{server.server.addresses.port}"


@pytest.mark.parametrize("kind", ["IPv4", "IPv6", "unix"])
async def test_a_client_with_little_time_is_served_beside_hundreds_of_strangers(
    kind: str, tmp_path: Path, mock_clock: MockClock
) -> None:
    """The clock stands still: no stranger makes room because its time is over."""
    async with listening(kind, tmp_path) as (server, url):
        streams: list[Stream] = []
        for number in range(300):
            addresses = server.server.addresses
            path = str(addresses.unix_socket)
            stream: Stream = await (connect_unix(path) if kind == "unix" else connect_tcp(*addresses.tcp[0]))
            await stream.send_all([memoryview(HELLO[: number % 3 * 31])])
            streams.append(stream)
        async with infinistore.open_store(url, deadline_s=5) as store:
            await store.put("key", b"value")
            assert await store.get("key") == b"value"
        assert server.server.telemetry.statistics().strangers_open <= MOST_STRANGERS
        for stream in streams:
            stream.close()
        await server.quiet()


async def test_a_wrong_token_takes_no_clients_place(tmp_path: Path, mock_clock: MockClock) -> None:
    (tmp_path / "token").write_text("right")
    config = make_config(max_connections=1, token_file=tmp_path / "token")
    async with running_server(config) as server:
        wrong = [await server.stranger() for _ in range(10)]
        for peer in wrong:
            with pytest.raises(AuthenticationFailed):
                await peer.hello("wrong")
        right = await server.stranger()
        await right.hello("right")
