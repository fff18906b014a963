"""Opening and closing a store: whose error comes out, and what is left behind."""

import asyncio
import copy
import itertools
import mmap
import os
import pickle
import resource
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import trio

import infinistore
from infinistore import aio, blocking
from infinistore.errors import AuthenticationFailed, LimitExceeded, OutOfMemory, StoreUnavailable
from tests.bad_days.refused_threads import refused_threads
from tests.clients.conftest import Remotes
from tests.clients.dresses import opened
from tests.clients.stores import STORES, Loops, differing
from tests.server.running import MIB, make_config, running_server


class OwnError(Exception):
    """What a caller raises inside the block."""


@pytest.mark.parametrize("remote", [True, False], ids=["remote", "embedded"])
async def test_the_callers_own_exception_leaves_the_block_as_itself(remote: bool) -> None:
    async with running_server() as server:
        mine = OwnError()

        async def use() -> None:
            async with infinistore.open_store(server.url if remote else None) as store:
                await store.put("a", b"abc")
                raise mine

        with pytest.raises(OwnError) as raised:
            await use()
        assert raised.value is mine
        await server.quiet()


@pytest.mark.parametrize("kind", differing(STORES))
def test_a_store_that_is_closed_is_unavailable(kind: str, loops: Loops) -> None:
    with STORES[kind](loops, make_config(), {}, 1) as opened:
        store = opened.store
        store.put("a", b"abc")
    for call in (lambda: store.get("a"), lambda: store.put("a", b"x"), lambda: store.exists("a"), store.stats):
        with pytest.raises(StoreUnavailable, match="closed"):
            call()


async def opened_by_hand(connect: Callable[..., Awaitable[aio.AsyncStore]], url: str | None) -> None:
    store = await connect(url)
    await store.put("by-hand", b"abc")
    assert (await store.get("by-hand"), await store.get("missing", None)) == (bytearray(b"abc"), None)
    for _ in range(2):
        await store.aclose()
    with pytest.raises(StoreUnavailable, match="closed"):
        await store.get("by-hand")
    with pytest.raises(StoreUnavailable, match="nowhere"):
        await connect("unix:///nowhere")


@pytest.mark.parametrize("remote", [True, False], ids=["remote", "embedded"])
def test_a_store_that_was_connected_is_open_until_it_is_closed(loops: Loops, remote: bool) -> None:
    with loops.trio.entered(running_server) as server:
        url = server.url if remote else None
        store = blocking.connect(url)
        store.put("by-hand", b"abc")
        assert (store.get("by-hand"), store.get("missing", 5)) == (bytearray(b"abc"), 5)
        for _ in range(2):
            store.close()
        with pytest.raises(StoreUnavailable, match="closed"):
            store.get("by-hand")
        with pytest.raises(StoreUnavailable, match="nowhere"):
            blocking.connect("unix:///nowhere")
        loops.trio.run(opened_by_hand, infinistore.connect, url)
        loops.asyncio.run(opened_by_hand, aio.connect, url)
        loops.trio.run(server.quiet)


def test_a_store_for_asyncio_outlives_the_loop_that_opened_it(loops: Loops) -> None:
    with loops.trio.entered(running_server) as server:
        opening = aio.open_store(server.url)
        store = asyncio.run(opening.__aenter__())
        asyncio.run(store.put("a", b"abc"))
        assert asyncio.run(store.get("a")) == b"abc"
        asyncio.run(opening.__aexit__(None, None, None))
        loops.trio.run(server.quiet)


def test_a_store_of_another_loop_says_which_one_to_open() -> None:
    async def opens(module: Any) -> None:
        async with module.open_store():
            raise AssertionError("opened")

    with pytest.raises(RuntimeError, match=r"under asyncio use infinistore\.aio\.open_store"):
        asyncio.run(opens(infinistore))
    with pytest.raises(RuntimeError, match=r"under Trio use infinistore\.open_store"):
        trio.run(opens, aio)


def test_what_open_store_returns_is_no_store_and_says_what_to_write() -> None:
    opening: Any = blocking.open_store()
    with pytest.raises(AttributeError, match=r"no 'get': write `with .* or `store = connect"):
        opening.get("a")
    opening = infinistore.open_store()
    with pytest.raises(AttributeError, match=r"no 'get': write `async with .* or `store = await connect"):
        opening.get("a")
    opening = blocking.open_store()
    with opening as store, pytest.raises(RuntimeError, match="call `open_store` again"):
        opening.__enter__()
    with pytest.raises(StoreUnavailable):
        store.get("a")


def test_a_store_says_where_it_is_and_cannot_be_copied() -> None:
    for url in ("", "tcp://10.0.0.1:5", "infinistore+static://a:1,b:2"):
        with blocking.open_store(f"{url}?deadline_s=5", lazy=True) if url else blocking.open_store() as store:
            assert repr(store) == f"<BlockingStore {url or 'in this process'}>"
            for copied in (pickle.dumps, copy.copy):
                with pytest.raises(TypeError, match="open one in each process"):
                    copied(store)


@pytest.mark.parametrize("kind", ["embedded-threads", "threads"])
def test_threads_whose_store_is_closed_under_them_see_only_that_it_is_unavailable(kind: str, loops: Loops) -> None:
    begun = threading.Barrier(9)

    def work(store: blocking.BlockingStore, number: int) -> None:
        for turn in itertools.count():
            store.put_many({f"{number}/{i}": bytes([turn % 256]) * 50_000 for i in range(4)})
            values = {bytes(value) for value in store.get_many([f"{number}/0", f"{number}/1"]) if value}
            assert values <= {bytes([turn % 256]) * 50_000}
            if turn == 3:
                begun.wait()

    with ThreadPoolExecutor(8) as threads:
        with STORES[kind](loops, make_config(prealloc_bytes=32 * MIB), {}, 1) as opened:
            working = [threads.submit(work, opened.store, number) for number in range(8)]
            begun.wait()
        assert [type(one.exception()) for one in working] == [StoreUnavailable] * 8


def test_each_embedded_store_has_its_own_keys() -> None:
    with blocking.open_store(pool_bytes=MIB) as one, blocking.open_store(pool_bytes=MIB) as other:
        one.put("a", b"1")
        assert not other.exists("a")


def test_puts_in_an_embedded_store_touch_no_page_for_the_first_time_and_opening_it_needs_no_thread() -> None:
    value = os.urandom(4 * MIB)
    with refused_threads(), blocking.open_store(pool_bytes=8 * MIB) as store:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        store.put("a", value)
        faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
        assert faults < len(value) / mmap.PAGESIZE / 4


def test_an_embedded_store_larger_than_the_machine_is_out_of_memory() -> None:
    with pytest.raises(OutOfMemory), blocking.open_store(pool_bytes=1 << 50):
        pass


def test_nobody_there_is_known_at_once(loops: Loops, dress: str) -> None:
    with pytest.raises(StoreUnavailable, match="nowhere"), opened(loops, dress, "unix:///nowhere/socket"):
        pass


def test_a_wrong_token_is_known_at_once_and_the_right_one_opens(
    remotes: Remotes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if remotes.kind == "simulated":
        pytest.skip("the simulated server has no token")
    file = tmp_path / "token"
    file.write_text("secret\n")
    monkeypatch.delenv("INFINISTORE_TOKEN", raising=False)
    for wrong in ({}, {"token": "wrong"}):
        with pytest.raises(AuthenticationFailed):
            remotes.open(wrong, token_file=file)
    remotes.open({"token": "secret"}, token_file=file).store.put("a", b"abc")
    monkeypatch.setenv("INFINISTORE_TOKEN", "secret")
    remotes.open({}, token_file=file).store.put("a", b"abc")


def test_unix_sockets_do_what_tcp_does(remotes: Remotes, tmp_path: Path) -> None:
    if remotes.kind == "simulated" or remotes.kind.startswith("rdma"):
        pytest.skip("a simulated network has no sockets, and RDMA begins with TCP")
    store = remotes.open({}, unix_socket=str(tmp_path / "socket")).store
    value = bytes(range(256)) * 4096
    store.put_many({"a": value, "b": b"x"})
    assert store.get("a") == value
    assert store.stats().transport == ("shm" if remotes.kind.startswith("shm") else "unix")


def test_a_store_takes_no_more_connections_than_it_may(remotes: Remotes) -> None:
    opened = remotes.open({"max_connections": 2})
    store = opened.store
    with ThreadPoolExecutor(40) as threads:
        puts = threads.map(lambda number: store.put(f"key {number}", bytes(MIB // 8)), range(20))
        assert [*threads.map(store.exists, ["missing"] * 20), *puts] == [False] * 20 + [None] * 20
    server = store.stats().server
    assert server is not None
    assert server.connections_open <= 4  # two for blocks, two for look-ups
    assert server.connections_total <= 4


def test_a_server_without_a_free_connection_says_so(remotes: Remotes) -> None:
    if remotes.kind == "simulated":
        pytest.skip("a simulated network cannot be entered from here")
    opened = remotes.open({"max_connections": 1}, max_connections=1)
    assert opened.server is not None
    with pytest.raises(LimitExceeded, match="--max-connections"), blocking.open_store(opened.server.url):
        pass
    opened.store.put("a", b"abc")


# Lazily


@pytest.mark.usefixtures("no_pauses")
def test_a_lazy_store_opens_before_its_server_and_finds_it_later(dress: str, loops: Loops, tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with opened(loops, dress, f"unix://{path}", lazy=True) as store:
        with pytest.raises(StoreUnavailable):
            store.exists("a")
        with loops.trio.entered(lambda: running_server(make_config(unix_socket=path))):
            store.put("a", b"abc")
            assert store.get("a") == b"abc"
