"""Everything that a call can wait for ends with its deadline, and the error says what
it was.

Here the peer never answers. What ends too late, ends never: then the time that a test
may take is over. `tests/clients/test_bad_servers.py` measures in virtual time.
"""

import asyncio
import errno
import math
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import trio

from infinistore import aio, blocking, open_store
from infinistore.aio import AsyncStore
from infinistore.blocking import BlockingStore
from infinistore.client.connection.pool import Connection
from infinistore.client.movers.channel import Channel
from infinistore.client.options import Options
from infinistore.errors import (
    AuthenticationFailed,
    ConfigError,
    DeadlineExceeded,
    LimitExceeded,
    StoreUnavailable,
    VersionMismatch,
)
from infinistore.transports.sockets.blocking_streams import BlockingSocketStream
from tests.bad_days.clients import KINDS, run_with_store
from tests.bad_days.faults import Action, Direction, Fault, Proxy
from tests.bad_days.full_backlog import full
from tests.bad_days.operations import OLD, OPERATIONS, outcome, prepare, works_again
from tests.bad_days.refused_threads import refused_threads
from tests.bad_days.servers import ServerUrl, running_server_here

SHORT_S = 0.1
LONG_BYTES = 8 << 20  # more than what sockets keep
ANY_KIND = pytest.mark.parametrize("kind", KINDS)


async def nothing(store: AsyncStore) -> None:
    raise AssertionError("the store should not have opened")


def url_of(listener: socket.socket) -> str:
    return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A server that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield listener


@pytest.fixture(params=["undisturbed", "signals", "no threads"])
def disturbance(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nothing; no more threads; or a signal now and then, as an alarm makes it, which
    interrupts system calls.
    """
    if request.param == "undisturbed":
        yield
        return
    if request.param == "no threads":
        with refused_threads():
            yield
        return
    over = threading.Event()
    unraisable = sys.unraisablehook
    ours = signal.signal(signal.SIGUSR1, lambda *_: None)

    def report(what: "sys.UnraisableHookArgs") -> None:
        # Trio closes the socket that signals wake it by before it takes it back: a
        # signal in between is told here.
        if not (what.object is None and isinstance(what.exc_value, OSError) and what.exc_value.errno == errno.EBADF):
            unraisable(what)

    def disturb() -> None:
        # A wait that begins anew each time never ends.
        while not over.wait(0.02):  # real time: a pause between two signals, however long
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    thread = threading.Thread(target=disturb)
    sys.unraisablehook = report
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        sys.unraisablehook = unraisable
        signal.signal(signal.SIGUSR1, ours)


UNDISTURBED_OR_NOT = pytest.mark.usefixtures("disturbance")


@ANY_KIND
@UNDISTURBED_OR_NOT
def test_a_server_that_never_answers_the_hello(kind: str, silent: socket.socket) -> None:
    with pytest.raises(DeadlineExceeded, match=r"no connection to .* within 0\.1 s"):
        run_with_store(kind, url_of(silent), nothing, deadline_s=SHORT_S)


@ANY_KIND
@UNDISTURBED_OR_NOT
def test_an_address_where_packets_disappear(kind: str) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        full(listener, listener.getsockname()),
        pytest.raises(DeadlineExceeded, match="no connection to"),
    ):
        run_with_store(kind, url_of(listener), nothing, deadline_s=SHORT_S)


@ANY_KIND
@UNDISTURBED_OR_NOT
def test_a_unix_socket_where_nobody_accepts(kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        with full(listener, path), pytest.raises((DeadlineExceeded, StoreUnavailable)):
            run_with_store(kind, f"unix://{path}", nothing, deadline_s=SHORT_S)


@pytest.fixture
def slow_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Look-ups of names take until the test is over."""
    over = threading.Event()
    look_up = socket.getaddrinfo

    def slow(*arguments: Any, **named: Any) -> Any:
        flags = named.get("flags", arguments[5] if len(arguments) > 5 else 0)
        if not flags & socket.AI_NUMERICHOST:
            over.wait()
        return look_up(*arguments, **named)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    yield
    over.set()
    for thread in threading.enumerate():
        if thread.name.startswith("look up"):
            thread.join()


@ANY_KIND
@UNDISTURBED_OR_NOT
@pytest.mark.usefixtures("slow_names")
def test_a_name_that_nobody_resolves(kind: str) -> None:
    late = pytest.raises((DeadlineExceeded, StoreUnavailable), match=r"no connection to|no more threads")
    with late:
        run_with_store(kind, "tcp://localhost:1", nothing, deadline_s=SHORT_S)


@ANY_KIND
def test_a_second_address_is_tried_when_the_first_one_is_dead(
    kind: str, server: ServerUrl, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_up = socket.getaddrinfo
    with socket.create_server(("127.0.0.1", 0)) as listener, full(listener, listener.getsockname()):
        dead = listener.getsockname()[1]

        def two(host: Any, port: Any, *arguments: Any, **named: Any) -> Any:
            if host == "two.example":
                return [found for port in (dead, server.port) for found in look_up("127.0.0.1", port, 0, 1)]
            return look_up(host, port, *arguments, **named)

        monkeypatch.setattr(socket, "getaddrinfo", two)

        async def body(store: AsyncStore) -> bool:
            return await store.exists("anything")

        assert run_with_store(kind, f"tcp://two.example:{server.port}", body) is False


def calls_of(store: Any) -> Any:
    """What every remote store keeps its connections in."""
    return getattr(store, "wrapped", store).calls


@contextmanager
def hastened(store: Any) -> Iterator[None]:
    """A short deadline for calls in this block, of a store that has connected."""
    calls = calls_of(store)
    patient = calls.options
    calls.options = attrs.evolve(patient, deadline_s=SHORT_S)
    try:
        yield
    finally:
        calls.options = patient


def slots(store: Any) -> tuple[Any, Any]:
    return store.payload_turns, store.lookup_turns


@UNDISTURBED_OR_NOT
def test_waiting_for_a_free_connection_ends_with_the_deadline_and_is_not_held_against_the_server(
    server: ServerUrl,
) -> None:
    refused = r"no connection of this store came free within 0\.1 s; make fewer calls at a time, or raise"

    def check(error: pytest.ExceptionInfo[DeadlineExceeded], store: Any) -> None:
        assert "not known" not in str(error.value)  # nothing was sent
        assert calls_of(store).breaker.failures == 0

    def with_threads() -> None:
        with blocking.open_store(server.url, max_connections=1) as store:
            turns: Any = store.payload_turns  # type: ignore[attr-defined]
            turn = threading.Lock()
            with turn:
                turns.begin(turn, SimpleNamespace(deadline=math.inf))
                with hastened(store), pytest.raises(DeadlineExceeded, match=refused) as error:
                    store.put("a", b"b")
            check(error, store)
            turns.end(turn)
            store.put("a", b"b")

    async def with_trio() -> None:
        async with open_store(server.url, max_connections=1) as store:
            slots(store)[0].acquire_nowait()
            with hastened(store), pytest.raises(DeadlineExceeded, match=refused) as error:
                await store.put("a", b"b")
            check(error, store)
            slots(store)[0].release()
            await store.put("a", b"b")

    async def with_asyncio() -> None:
        async with aio.open_store(server.url, max_connections=1) as store:
            async with slots(store)[0]:
                with hastened(store), pytest.raises(DeadlineExceeded, match=refused) as error:
                    await store.put("a", b"b")
            check(error, store)
            await store.put("a", b"b")

    with_threads()
    trio.run(with_trio)
    asyncio.run(with_asyncio())


@ANY_KIND
@UNDISTURBED_OR_NOT
@pytest.mark.parametrize("direction", [Direction.REQUEST, Direction.REPLY])
def test_a_server_that_stops_in_the_middle_of_a_call(
    kind: str, direction: Direction, proxy: Proxy, direct: BlockingStore
) -> None:
    direct.put("long", bytes(LONG_BYTES))

    async def body(store: AsyncStore) -> None:
        error: Exception | None = None
        while "no answer from" not in str(error):  # on a busy machine there may be no time to send
            proxy.disarm()
            await works_again(store)
            proxy.arm(Fault(Action.STALL, direction, 1000))
            put = direction is Direction.REQUEST
            with hastened(store):
                _, error = await outcome(store.put("other", bytes(LONG_BYTES)) if put else store.get("long"))
            assert isinstance(error, DeadlineExceeded)
        proxy.disarm()

    run_with_store(kind, proxy.url, body)


@UNDISTURBED_OR_NOT
@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET])
@pytest.mark.parametrize(
    "wait",
    [
        lambda stream: stream.receive_into([memoryview(bytearray(10))]),
        lambda stream: stream.receive_into([memoryview(bytearray(1 << 20))]),
        lambda stream: stream.receive_into([memoryview(bytearray(10))] * 2),
        lambda stream: stream.receive_descriptors([memoryview(bytearray(10))], []),
        lambda stream: stream.send_all([memoryview(bytes(LONG_BYTES))]),
    ],
    ids=["a short receive", "a long receive", "a receive of several", "descriptors", "a send"],
)
def test_a_stream_with_a_peer_that_does_nothing(family: int, wait: Callable[[BlockingSocketStream], object]) -> None:
    with connected(family) as (ours, _):
        stream = BlockingSocketStream(ours)
        stream.deadline = time.monotonic() + SHORT_S  # real time: the peer never does anything
        with pytest.raises(TimeoutError):
            wait(stream)


@contextmanager
def connected(family: int) -> Iterator[tuple[socket.socket, socket.socket]]:
    if family == socket.AF_UNIX:
        ours, theirs = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = socket.create_connection(listener.getsockname())
            theirs = listener.accept()[0]
    with ours, theirs:
        yield ours, theirs


def test_a_cancelled_call_lets_the_next_in_line_go_and_one_cancelled_in_line_leaves_it(
    proxy: Proxy, direct: BlockingStore
) -> None:
    prepare(OPERATIONS[0], direct)
    stall = Fault(Action.STALL, Direction.REPLY, 0)

    async def with_trio() -> None:
        async with open_store(proxy.url, max_connections=1) as store, trio.open_nursery() as nursery:

            async def call(scope: trio.CancelScope) -> None:
                with scope:
                    await store.get("k0")

            for _ in range(3):
                first, second = trio.CancelScope(), trio.CancelScope()
                proxy.arm(stall)
                nursery.start_soon(call, first)
                await trio.to_thread.run_sync(proxy.struck.wait)
                nursery.start_soon(call, second)
                await trio.testing.wait_all_tasks_blocked()
                second.cancel()
                await trio.testing.wait_all_tasks_blocked()
                first.cancel()
                assert await store.get("k0") == OLD["k0"]

    async def with_asyncio() -> None:
        async with aio.open_store(proxy.url, max_connections=1) as store:
            for _ in range(3):
                proxy.arm(stall)
                first = asyncio.create_task(store.get("k0"))
                await asyncio.to_thread(proxy.struck.wait)
                second, third = (asyncio.create_task(store.get("k0")) for _ in range(2))
                for _ in range(5):
                    await asyncio.sleep(0)
                second.cancel()
                first.cancel()
                assert await third == OLD["k0"]
                await asyncio.gather(first, second, return_exceptions=True)
                assert first.cancelled() and second.cancelled()

    trio.run(with_trio)
    asyncio.run(with_asyncio())


def test_a_call_under_way_when_the_store_is_closed_is_finished_and_leaves_nothing_open(
    proxy: Proxy, direct: BlockingStore
) -> None:
    prepare(OPERATIONS[0], direct)
    stall = Fault(Action.STALL, Direction.REPLY, 0)
    results: list[object] = []

    def with_threads() -> None:
        with blocking.open_store(proxy.url) as store:
            store.exists("k0")
            proxy.arm(stall)
            thread = threading.Thread(target=lambda: results.append(store.get("k0")))
            thread.start()
            assert proxy.struck.wait()
        with pytest.raises(StoreUnavailable, match="this store is closed"):
            store.get("k0")
        proxy.release()
        thread.join()

    async def with_trio() -> None:
        async with trio.open_nursery() as nursery:
            async with open_store(proxy.url) as store:
                await store.exists("k0")
                proxy.arm(stall)

                async def call() -> None:
                    results.append(await store.get("k0"))

                nursery.start_soon(call)
                await trio.to_thread.run_sync(proxy.struck.wait)
            with pytest.raises(StoreUnavailable, match="this store is closed"):
                await store.get("k0")
            proxy.release()

    async def with_asyncio() -> None:
        async with aio.open_store(proxy.url) as store:
            await store.exists("k0")
            proxy.arm(stall)
            task = asyncio.create_task(store.get("k0"))
            await asyncio.to_thread(proxy.struck.wait)
        with pytest.raises(StoreUnavailable, match="this store is closed"):
            await store.get("k0")
        proxy.release()
        results.append(await task)

    with_threads()
    trio.run(with_trio)
    asyncio.run(with_asyncio())
    assert results == [OLD["k0"]] * 3
    proxy.wait_for_ends()


def test_many_threads_that_close_a_store_while_they_use_it_leave_no_connection_open(
    proxy: Proxy, direct: BlockingStore
) -> None:
    prepare(OPERATIONS[0], direct)
    errors: list[str] = []
    for _ in range(20):
        with blocking.open_store(proxy.url) as store:

            def use(store: BlockingStore = store) -> None:
                try:
                    while True:
                        assert store.get("k2") == OLD["k2"]
                except StoreUnavailable as error:
                    errors.append(str(error))

            threads = [threading.Thread(target=use) for _ in range(4)]
            for thread in threads:
                thread.start()
            store.get("k1")
        for thread in threads:
            thread.join()
    assert errors == ["this store is closed; open another one"] * 80
    proxy.wait_for_ends()


@ANY_KIND
def test_every_method_of_a_closed_store_says_so(kind: str, server: ServerUrl) -> None:
    async def body(store: AsyncStore) -> AsyncStore:
        return store

    for url in (server.url, None):
        store = run_with_store(kind, url, body, **({} if url else {"pool_bytes": 1 << 20}))
        for operation in OPERATIONS:
            call = operation.call(store, "1f")
            with pytest.raises(StoreUnavailable, match="this store is closed; open another one"):
                call.__await__().send(None)  # outside any loop: it must not wait


def test_many_threads_that_close_an_embedded_store_while_they_use_it_get_the_same_error() -> None:
    errors: list[str] = []
    for _ in range(40):
        with blocking.open_store(pool_bytes=1 << 22, minimal_allocate_bytes=1024) as store:
            store.put("a", b"x" * 300_000)

            def use(store: BlockingStore = store) -> None:
                try:
                    while True:
                        store.put("b", b"y" * 200_000)
                        assert store.get("a") == b"x" * 300_000
                except StoreUnavailable as error:
                    errors.append(str(error))

            threads = [threading.Thread(target=use) for _ in range(3)]
            for thread in threads:
                thread.start()
        for thread in threads:
            thread.join()
    assert errors == ["this store is closed; open another one"] * 120


def calls(kind: str) -> list[Callable[[AsyncStore], Awaitable[object]]]:
    return [lambda store: store.get("k0"), lambda store: store.exists("k0"), lambda store: store.put("k0", b"x")]


@ANY_KIND
def test_a_server_that_is_full_says_so_at_once_and_is_not_asked_again(kind: str) -> None:
    with running_server_here(max_connections=1) as server:

        async def body(store: AsyncStore) -> None:
            # The one connection there may be is this store's: another store is refused.
            with pytest.raises(LimitExceeded, match="--max-connections"), blocking.open_store(server.url):
                pass
            assert await store.exists("k0") is False
            forget_connections(store)
            with blocking.open_store(server.url) as other:
                for call in calls(kind):
                    with pytest.raises(LimitExceeded, match="--max-connections"):
                        await call(store)
                refused = other.stats().server
            assert refused is not None and refused.connections_refused == 4
            assert await store.exists("k0") is False

        run_with_store(kind, server.url, body)


def forget_connections(store: AsyncStore) -> None:
    """Close the idle connections, and wait until the server has noticed: its next
    connection finds room.
    """
    for link in list(calls_of(store).pool.idle):
        link.stream.socket.shutdown(socket.SHUT_WR)
        link.stream.socket.setblocking(True)
        assert link.stream.socket.recv(1) == b""
    calls_of(store).pool.close_idle()


@ANY_KIND
def test_a_wrong_token_is_refused_once_and_never_tried_again(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("right")
    monkeypatch.delenv("INFINISTORE_TOKEN", raising=False)
    with running_server_here(token_file=token_file) as server:
        with pytest.raises(AuthenticationFailed):
            run_with_store(kind, server.url, nothing, token="wrong")
        with blocking.open_store(server.url, token="right") as direct:

            async def body(store: AsyncStore) -> None:
                before = direct.stats().server
                calls_of(store).router.options = Options(token="changed")
                calls_of(store).pool.close_idle()
                for call in calls(kind):
                    with pytest.raises(AuthenticationFailed):
                        await call(store)
                after = direct.stats().server
                assert before is not None and after is not None
                assert after.connections_total == before.connections_total + 3

            run_with_store(kind, server.url, body, token="right")


@ANY_KIND
def test_a_server_of_another_version_is_told_apart_and_not_tried_again(
    kind: str, proxy: Proxy, direct: BlockingStore
) -> None:
    another = Fault(Action.REPLACE, Direction.REPLY, 4, b"\x02")
    proxy.arm(another)
    with pytest.raises(VersionMismatch, match=r"version 2 .* install the same release"):
        run_with_store(kind, proxy.url, nothing)
    assert proxy.accepted == 1

    async def body(store: AsyncStore) -> None:
        proxy.refuse()
        proxy.accept_again()
        proxy.arm(another)
        with pytest.raises(VersionMismatch):
            await store.get("k0")
        assert proxy.accepted == 3
        await store.exists("k0")

    run_with_store(kind, proxy.url, body)


@ANY_KIND
@pytest.mark.usefixtures("quick_breaker")
def test_a_process_without_free_descriptors_gets_a_typed_error_and_goes_on_later(kind: str, server: ServerUrl) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def body(store: AsyncStore) -> None:
        calls_of(store).pool.close_idle()
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            with pytest.raises(StoreUnavailable, match="Too many open files"):
                await store.delete(["k0"])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await works_again(store)

    run_with_store(kind, server.url, body)


def test_the_deadline_in_a_header_is_never_zero_which_would_mean_for_ever() -> None:
    channel: Channel = Connection(object(), Options(), lambda: 100.0).channel
    for left_s, expected_us in ((-5.0, 1), (0.0, 1), (1e-9, 1), (1.5, 1_500_000)):
        channel.deadline = 100.0 + left_s
        assert channel.remaining_us() == expected_us


@ANY_KIND
def test_a_deadline_may_be_as_long_as_a_lifetime(kind: str, server: ServerUrl) -> None:
    async def body(store: AsyncStore) -> None:
        await store.put("k0", b"x")
        assert await store.get("k0") == b"x"

    run_with_store(kind, server.url, body, deadline_s=1e9)


@pytest.mark.parametrize("deadline_s", [0, -1, float("nan"), float("inf"), 1.1e9, 1e300])
def test_a_deadline_that_no_clock_can_keep_is_refused(deadline_s: float) -> None:
    with (
        pytest.raises(ConfigError, match="deadline_s"),
        blocking.open_store("tcp://127.0.0.1:1", deadline_s=deadline_s),
    ):
        pass


@ANY_KIND
def test_a_tiny_deadline_is_a_deadline(kind: str, server: ServerUrl) -> None:
    with pytest.raises(DeadlineExceeded):
        run_with_store(kind, server.url, nothing, deadline_s=1e-9)  # real time: it is over before a connect
