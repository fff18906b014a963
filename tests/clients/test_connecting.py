"""A server whose name has several addresses, of which only a later one answers: every
client finds it, however short its calls are.
"""

import asyncio
import errno
import select
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import pytest
import trio
import trio.testing

from infinistore.client.options import Options
from infinistore.errors import InfiniStoreException
from infinistore.transports.sockets import asyncio_streams, blocking_streams, trio_streams
from infinistore.transports.sockets.names import NEXT_ADDRESS_AFTER_S, Dial, Dialer, SocketAddress
from infinistore.transports.sockets.spin import Spinner
from tests.asking import until
from tests.bad_days.full_backlog import full
from tests.clients.dresses import DRESSES, opened
from tests.clients.event_loops import Loops
from tests.server.running import make_config, running_server

NAME = "two.example"


@pytest.fixture
def dead() -> Iterator[int]:
    """A port where nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener, full(listener, listener.getsockname()):
        yield listener.getsockname()[1]


def addresses(*ports: int) -> list[SocketAddress]:
    return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port)) for port in ports]


@pytest.fixture
def name(dead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with two addresses, of which the first is dead; the other has the port
    that is asked for.
    """
    look_up = socket.getaddrinfo

    def two(host: Any, port: Any, *arguments: Any, **named: Any) -> Any:
        if host == NAME:
            return [found for each in (dead, port) for found in look_up("127.0.0.1", each, type=socket.SOCK_STREAM)]
        return look_up(host, port, *arguments, **named)

    monkeypatch.setattr(socket, "getaddrinfo", two)


@pytest.mark.usefixtures("name")
@pytest.mark.parametrize("scheme", ["tcp", "infinistore+static"])
@pytest.mark.parametrize("dress", DRESSES)
def test_a_store_is_connected_though_each_look_up_is_over_before_the_second_address_is_tried(
    loops: Loops, dress: str, scheme: str
) -> None:
    with loops.trio.entered(lambda: running_server(make_config())) as server:
        port = server.server.addresses.port
        with opened(loops, dress, f"tcp://127.0.0.1:{port}") as direct:
            direct.put("key", b"value")
        short_s = NEXT_ADDRESS_AFTER_S / 2
        limits = {"deadline_s": short_s} if scheme == "tcp" else {"lookup_deadline_s": short_s}
        with opened(loops, dress, f"{scheme}://{NAME}:{port}", lazy=True, **limits) as store:

            def found() -> bool:
                with suppress(InfiniStoreException):
                    return store.exists("key")
                return False

            until(found)


def by_threads(port: int, deadline_s: float, dialer: Dialer) -> socket.socket | None:
    try:
        deadline = time.monotonic() + deadline_s  # real time: it has passed, or is never reached
        return blocking_streams.connect_tcp(NAME, port, deadline, dialer=dialer).socket
    except TimeoutError:
        return None


def by_asyncio(port: int, deadline_s: float, dialer: Dialer) -> socket.socket | None:
    async def connect() -> socket.socket | None:
        try:
            async with asyncio.timeout(deadline_s):
                return (await asyncio_streams.connect_tcp(NAME, port, Spinner(), dialer)).socket
        except TimeoutError:
            return None

    return asyncio.run(connect())


def by_trio(port: int, deadline_s: float, dialer: Dialer) -> socket.socket | None:
    async def connect() -> socket.socket | None:
        with trio.move_on_after(deadline_s):
            return (await trio_streams.connect_tcp(NAME, port, dialer)).socket
        return None

    return trio.run(connect, clock=trio.testing.MockClock(rate=1.0))  # one clock for all calls


@pytest.mark.usefixtures("name")
@pytest.mark.parametrize("connect", [by_threads, by_asyncio, by_trio])
def test_what_a_call_has_begun_goes_on_and_the_next_one_finds_it(
    connect: Callable[[int, float, Dialer], socket.socket | None],
) -> None:
    dialer = Dialer()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        sock = None
        while not select.select([listener], [], [], 0)[0]:
            sock = connect(port, 0.01, dialer)
        served, _ = listener.accept()
        sock = sock or connect(port, 60, dialer)
        assert sock is not None and sock.getsockname() == served.getpeername()
        sock.close()
        served.close()
    dialer.close()


def test_the_next_address_is_tried_while_a_look_up_still_waits() -> None:
    assert Options().lookup_deadline_s > NEXT_ADDRESS_AFTER_S


def test_an_answer_that_came_when_nobody_waited_is_used_soon_and_not_hours_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("infinistore.transports.sockets.names.look_up", lambda host, port: Future[Any]())
    dialer = Dialer()
    answer = dialer.look_up(NAME, 1, 0.0)
    assert dialer.look_up(NAME, 1, 20.0) is answer  # not there yet
    answer.set_result([])
    assert dialer.look_up(NAME, 1, 29.0) is answer
    assert dialer.look_up(NAME, 1, 31.0) is not answer


def connected(dial: Dial, now: float) -> socket.socket:
    while (sock := dial.connected(now)) is None:
        select.select([], dial.sockets, [])
    return sock


def test_addresses_race_and_the_one_that_answered_comes_first_the_next_time(dead: int) -> None:
    dialer = Dialer()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = addresses(dead, listener.getsockname()[1])
        with dialer.dial(found, 0.0) as dial:
            assert dial.connected(0.0) is None
            assert dial.next_at == NEXT_ADDRESS_AFTER_S
            assert len(dial.sockets) == 1
            sock = connected(dial, NEXT_ADDRESS_AFTER_S)
        sock.close()
        with dialer.dial(found, 1.0) as dial:
            sock = connected(dial, 1.0)
        sock.close()
    dialer.close()


def test_an_address_that_refuses_is_not_waited_for_and_the_last_reason_is_told() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        with Dialer().dial(addresses(port, port), 0.0) as dial, pytest.raises(OSError, match="refused") as raised:
            connected(dial, 0.0)
        assert raised.value.errno == errno.ECONNREFUSED


def test_one_attempt_for_each_address_goes_on_and_not_for_ever(dead: int) -> None:
    dialer = Dialer()
    begun: list[socket.socket] = []
    for now in (0.0, 1.0, 2.0):
        with dialer.dial(addresses(dead), now) as dial:
            assert dial.connected(now) is None
            begun += [sock for sock in dial.sockets if sock not in begun]
    assert [sock.fileno() >= 0 for sock in begun] == [True, False, False]
    with dialer.dial(addresses(dead), 60.0) as dial:
        assert dial.connected(60.0) is None
        assert begun[0].fileno() < 0
    dialer.close()
    with dialer.dial(addresses(dead), 61.0) as dial:
        assert dial.connected(61.0) is None
        (last,) = dial.sockets
    assert last.fileno() < 0
