"""A process that gets no more threads: a call does without, or raises
`StoreUnavailable`, and closing always works.
"""

import asyncio
import socket
from collections.abc import Callable, Iterator

import pytest
import trio

import infinistore
from infinistore import blocking
from infinistore.aio import AsyncStore
from infinistore.client.worker_threads import in_thread
from infinistore.errors import StoreUnavailable
from infinistore.transports.sockets.names import found_addresses, look_up
from tests.bad_days.clients import run_with_store
from tests.bad_days.operations import works_again
from tests.bad_days.refused_threads import refused_threads
from tests.bad_days.servers import ServerUrl, running_server_here
from tests.packaging.conftest import PROJECT
from tests.server.running import MIB, make_config

REFUSALS = pytest.mark.parametrize("refusal", [RuntimeError, MemoryError])
LONG_BYTES = 5 << 20  # two of them are copied by several threads


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server by shared memory."""
    path = tmp_path_factory.mktemp("server") / "socket"
    with running_server_here(unix_socket=str(path)):
        yield f"shm://{path}"


@REFUSALS
def test_a_look_up_without_a_thread_is_answered_and_forgotten(refusal: type[Exception]) -> None:
    with refused_threads(refusal) as refused:
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="no more threads: can't start new thread"):
                found_addresses(look_up("localhost", 1).result(0))  # real time: it is there already
    assert refused == ["look up localhost"] * 2
    assert found_addresses(look_up("localhost", 1).result(60))


def test_a_look_up_that_runs_out_of_memory_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    numeric = socket.getaddrinfo

    def fail(host: str, port: int, *, type: int, flags: int = 0) -> object:  # noqa: A002
        if flags:
            return numeric(host, port, type=type, flags=flags)
        raise MemoryError

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        found_addresses(look_up("localhost", 1).result(60))


@REFUSALS
@pytest.mark.usefixtures("quick_breaker")
def test_a_name_that_there_is_no_thread_to_look_up(kind: str, server: ServerUrl, refusal: type[Exception]) -> None:
    url = f"tcp://localhost:{server.port}"

    async def body(store: AsyncStore) -> None:
        with refused_threads(refusal), pytest.raises(StoreUnavailable, match="no more threads"):
            await store.exists("a")
        await works_again(store)

    with refused_threads(refusal), pytest.raises(StoreUnavailable, match="no more threads"):
        run_with_store(kind, url, body)
    run_with_store(kind, url, body, lazy=True)


@REFUSALS
def test_shared_memory_needs_no_threads(kind: str, local: str, refusal: type[Exception]) -> None:
    blocks = {name: name.encode() * LONG_BYTES for name in "ab"}

    async def body(store: AsyncStore) -> None:
        for _ in range(2):
            await store.put_many(blocks)
            read = await store.get_many(list(blocks))
            assert [bytes(block or b"") for block in read] == list(blocks.values())

    with refused_threads(refusal) as refused:
        run_with_store(kind, local, body, copy_threads=2)
    assert {"infinistore-populate", "infinistore-watch"} <= set(refused)


@REFUSALS
def test_an_embedded_store_needs_no_threads(kind: str, refusal: type[Exception]) -> None:
    async def body(store: AsyncStore) -> bytearray:
        await store.put("a", b"x")
        return await store.get("a")

    with refused_threads(refusal):
        assert run_with_store(kind, None, body, pool_bytes=1 << 20) == b"x"


@REFUSALS
@pytest.mark.parametrize("run", [trio.run, lambda work: asyncio.run(work())], ids=["trio", "asyncio"])
def test_work_for_a_thread_is_done_without_one_and_once(run: Callable[..., None], refusal: type[Exception]) -> None:
    done: list[int] = []

    async def work() -> None:
        with refused_threads(refusal):
            await in_thread(lambda: done.append(0))
        await in_thread(lambda: done.append(1))  # carries out what asyncio has kept, too

    run(work)
    assert done == [0, 1]


@REFUSALS
def test_a_layer_writer_is_refused_and_may_be_entered_later(refusal: type[Exception]) -> None:
    tensors = pytest.importorskip("infinistore.tensors", exc_type=ImportError)
    with blocking.open_store(pool_bytes=1 << 20) as store:
        writer = tensors.LayerWriter(store)
        with refused_threads(refusal), pytest.raises(StoreUnavailable, match="no more threads"):
            writer.__enter__()
        writer.close()
        with writer:
            pass


@REFUSALS
def test_a_server_in_this_process_is_refused_and_may_be_had_later(refusal: type[Exception]) -> None:
    config = make_config(prealloc_bytes=MIB)
    with refused_threads(refusal), pytest.raises(StoreUnavailable, match="no more threads"):
        infinistore.register_server(None, config)
    infinistore.register_server(None, config).stop()


def test_the_library_starts_threads_in_one_place() -> None:
    """`cli/` has its own, whose failure ends the command."""
    found = [
        str(file.relative_to(PROJECT))
        for folder in ("infinistore", "transports")
        for file in sorted((PROJECT / folder).rglob("*.py"))
        if file == file.resolve() and "threading.Thread(" in (text := file.read_text()) and "start_thread(" not in text
    ]
    assert [file for file in found if not file.startswith("infinistore/cli/")] == []
