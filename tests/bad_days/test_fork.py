"""A forked child leaves the parent's stores alone, of every kind, and opens stores of
its own.
"""

import multiprocessing
import os
import socket
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from infinistore import blocking
from infinistore.aio import AsyncStore
from infinistore.blocking import BlockingStore
from infinistore.errors import StoreUnavailable
from tests.bad_days.clients import each_in_turn, run_with_store
from tests.bad_days.faults import Action, Direction, Fault, Proxy
from tests.bad_days.operations import OLD, OPERATIONS, prepare
from tests.bad_days.servers import ServerProcess

pytestmark = pytest.mark.process
SMALL_POOL: dict[str, Any] = {"pool_bytes": 1 << 20}


@pytest.fixture
def server(server_process: ServerProcess) -> ServerProcess:
    """One in another process: a fork is of clients alone."""
    return server_process


@contextmanager
def forking() -> Iterator[None]:
    """Python 3.12 and later warn of forks while there are threads; here there are, on
    purpose.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore",
            message=r"This process \(pid=\d+\) is multi-threaded, use of fork\(\) may lead to deadlocks in the child",
            category=DeprecationWarning,
        )
        yield


def in_child(check: Callable[[], None]) -> None:
    """Run `check` in a forked child; fail as it fails."""
    reader, writer = os.pipe()
    with forking():
        pid = os.fork()
    if pid == 0:
        try:
            check()
        except BaseException:  # noqa: BLE001  # the child must not go on as a second pytest
            os.write(writer, traceback.format_exc().encode()[-4000:])
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as report:
        failure = report.read().decode()
    os.waitpid(pid, 0)
    assert not failure, failure


def sockets() -> set[str]:
    """The sockets that this process has open."""
    found = set()
    for name in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(name)
        except FileNotFoundError:  # the folder itself
            continue
        if target.startswith("socket:"):
            found.add(target)
    return found


def at_once(call: Any) -> Any:
    """Begin to await something; fail if it waits for a loop, which a child may not
    touch.
    """
    try:
        call.__await__().send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("the call waits for a loop")


def refuse_everything(store: AsyncStore) -> None:
    """Every operation of a store from before the fork refuses at once, and can be told
    what to do about it.
    """
    for operation in OPERATIONS:
        with pytest.raises(StoreUnavailable, match=r"opened before a fork .* open another one in the child"):
            at_once(operation.call(store, "1f"))


@each_in_turn("place", ["remote", "embedded"])
def test_an_inherited_store_is_unavailable_and_the_parent_goes_on(kind: str, place: str, server: ServerProcess) -> None:
    url, options = (server.url, dict[str, Any]()) if place == "remote" else (None, SMALL_POOL)

    async def body(store: AsyncStore) -> None:
        await store.put_many(OLD)
        assert await store.get("k0") == OLD["k0"]
        in_child(lambda: refuse_everything(store))
        assert [await store.get(key) for key in OLD] == [*OLD.values()]
        await store.put("k0", b"after the fork")
        if kind == "trio":  # a second fork is no other one
            in_child(lambda: refuse_everything(store))
        assert await store.get("k0") == b"after the fork"

    run_with_store(kind, url, body, **options)


@pytest.mark.parametrize("kind", ["trio", "blocking", "asyncio"])
def test_the_child_closes_its_copies_of_the_connections(kind: str, server: ServerProcess) -> None:
    others = sockets()

    async def body(store: AsyncStore) -> None:
        await store.put("k0", b"x")
        await store.exists("k0")
        inner: Any = getattr(store, "wrapped", store)
        streams = [link.stream for link in inner.calls.pool.connections]
        ours = {f"socket:[{os.fstat(stream.socket.fileno()).st_ino}]" for stream in streams}
        assert ours and ours <= sockets() - others

        def check() -> None:
            assert not ours & sockets()

        in_child(check)
        assert ours <= sockets()
        assert await store.get("k0") == b"x"

    run_with_store(kind, server.url, body)


def leave_block(url: str | None, **options: Any) -> None:
    """Fork inside a `with` block; the child leaves it as the parent does."""
    with blocking.open_store(url, **options) as store:
        store.put("k0", b"x")
        reader, writer = os.pipe()
        with forking():
            pid = os.fork()
        if pid:
            os.close(writer)
            with open(reader, "rb") as report:
                assert report.read() == b"left"
            os.waitpid(pid, 0)
            assert store.get("k0") == b"x"
    if not pid:
        os.write(writer, b"left")
        os._exit(0)


def test_a_child_may_leave_the_block_of_an_inherited_store(server: ServerProcess) -> None:
    leave_block(server.url)
    leave_block(None, **SMALL_POOL)


@each_in_turn("place", ["remote", "embedded"])
def test_a_child_opens_a_store_of_its_own(kind: str, place: str, server: ServerProcess) -> None:
    url, options = (server.url, dict[str, Any]()) if place == "remote" else (None, SMALL_POOL)

    async def use(store: AsyncStore) -> None:
        await store.put("of the child", b"c")
        assert await store.get("of the child") == b"c"

    with blocking.open_store(url, **options) as inherited:
        inherited.put("of the parent", b"p")

        def check() -> None:
            run_with_store(kind, url, use, **options)

        in_child(check)
        assert inherited.get("of the parent") == b"p"
        if place == "remote":
            assert inherited.get("of the child") == b"c"


def _report(inherited: BlockingStore, embedded: BlockingStore, url: str, report: Any) -> None:
    """What a worker process does."""
    said: list[object] = []
    for store in (inherited, embedded):
        try:
            store.get("k0")
        except StoreUnavailable as error:
            said.append(str(error))
    with blocking.open_store(url) as store:
        said.append(bytes(store.get("k0")))
    report.put(said)


def test_multiprocessing_may_fork_while_another_thread_is_inside_a_call(
    proxy: Proxy, direct: BlockingStore, server: ServerProcess
) -> None:
    prepare(OPERATIONS[0], direct)
    context = multiprocessing.get_context("fork")
    results: list[bytes | bytearray] = []
    with blocking.open_store(proxy.url) as store, blocking.open_store(**SMALL_POOL) as embedded:
        store.exists("k0")
        proxy.arm(Fault(Action.STALL, Direction.REPLY, 0))
        thread = threading.Thread(target=lambda: results.append(store.get("k0")))
        thread.start()
        assert proxy.struck.wait()
        report = context.SimpleQueue()
        with forking():
            worker = context.Process(target=_report, args=(store, embedded, server.url, report))
            worker.start()
        said = report.get()
        worker.join()
        assert worker.exitcode == 0
        assert [text[:32] for text in said[:2]] == ["this store was opened before a f"] * 2
        assert said[2] == OLD["k0"]
        proxy.release()
        thread.join()
        assert results == [OLD["k0"]]
        assert store.get("k1") == OLD["k1"]


def test_locks_that_another_thread_held_at_the_fork_keep_no_child_waiting(server: ServerProcess) -> None:
    """The thread that would release them does not exist in the child."""
    with blocking.open_store(server.url) as store, blocking.open_store(**SMALL_POOL) as embedded:
        calls: Any = store
        inner: Any = embedded

        def check() -> None:
            for inherited in (store, embedded):
                with pytest.raises(StoreUnavailable, match="opened before a fork"):
                    inherited.put("k0", b"x")
                calls.close()
                inner.embedded.close()

        with calls.calls.breaker._lock, inner.embedded.lock:
            in_child(check)
        store.put("k0", b"x")
        embedded.put("k0", b"x")


def test_a_name_being_looked_up_at_the_fork_is_looked_up_again_by_the_child(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = os.getpid()
    over, asked = threading.Event(), threading.Event()
    look_up = socket.getaddrinfo

    def slow(host: Any, port: Any, *arguments: Any, **named: Any) -> Any:
        if host == "server.example":
            if named.get("flags"):
                raise socket.gaierror
            asked.set()
            if os.getpid() == parent:
                over.wait()
            host = "127.0.0.1"
        return look_up(host, port, *arguments, **named)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    url = f"tcp://server.example:{server.port}"

    def use() -> None:
        with blocking.open_store(url) as store:
            assert store.exists("anything") is False

    thread = threading.Thread(target=use)
    thread.start()
    assert asked.wait()
    in_child(use)
    over.set()
    thread.join()
