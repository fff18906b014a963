"""A server that has ended has ended for its clients, too: they keep none of its memory,
whether they call or not.

Otherwise the next server finds no room for its pool, and a client that has nothing to
ask keeps it from starting.
"""

import gc
import os
import threading

import pytest

from infinistore import blocking
from infinistore.aio import AsyncStore
from infinistore.errors import StoreUnavailable
from tests.bad_days.clients import run_with_store
from tests.bad_days.memory import kept_by
from tests.bad_days.operations import works_again
from tests.bad_days.servers import ServerProcess

LONG = {f"key {number}": bytearray([number]) * 200_000 for number in range(4)}
"""Blocks that do not go inline."""

pytestmark = [pytest.mark.usefixtures("quick_breaker"), pytest.mark.process]


_of_servers_here: set[int] = set()


@pytest.fixture(autouse=True)
def _servers_here() -> None:
    """What servers in this process have, if there are any, is not kept by clients."""
    _of_servers_here.clear()
    _of_servers_here.update(kept_by(os.getpid()))


def kept() -> list[int]:
    """The lengths of what clients in this process keep of servers."""
    return [size for inode, size in kept_by(os.getpid()).items() if inode not in _of_servers_here]


def best(server: ServerProcess) -> str:
    """The URL by which clients find the Unix socket themselves."""
    return f"infinistore://127.0.0.1:{server.port}"


def until_nothing_is_kept() -> None:
    """Wait, without a call and without the loop, until nothing of a server is mapped
    here; the time limit ends it.
    """
    while kept():
        os.sched_yield()


async def use(store: AsyncStore) -> None:
    """Map all that a client may map: the pool, both ways, and the tables."""
    await store.put_many(LONG)
    for _ in range(2):
        assert await store.get_many(list(LONG)) == list(LONG.values())
    names = {os.readlink(f"/proc/self/map_files/{name}") for name in os.listdir("/proc/self/map_files")}
    assert {f"/memfd:infinistore-{what}-0 (deleted)" for what in ("arena", "removals", "reader")} <= names


@pytest.mark.parametrize("kind", ["trio", "blocking", "asyncio"])
def test_a_client_that_asks_nothing_keeps_nothing_of_a_server_that_was_killed(kind: str, mortal: ServerProcess) -> None:
    async def body(store: AsyncStore) -> None:
        await use(store)
        mortal.kill()
        until_nothing_is_kept()
        mortal.start()
        await works_again(store)
        assert await store.get_many(list(LONG)) == [None] * len(LONG)
        await use(store)

    run_with_store(kind, best(mortal), body)


@pytest.mark.parametrize("kind", ["trio", "blocking"])
def test_what_is_leased_stays_when_the_server_is_killed_and_no_longer_than_the_lease(
    kind: str, mortal: ServerProcess
) -> None:
    async def body(store: AsyncStore) -> None:
        await use(store)
        async with store.lease(LONG) as views:
            mortal.kill()
            while len(kept()) > 2:  # the arena; and the table of the connection, as long as it has pins
                os.sched_yield()
            assert b"".join(filter(None, views)) == b"".join(LONG.values())
        del views
        gc.collect()
        until_nothing_is_kept()

    run_with_store(kind, best(mortal), body)


def test_room_that_is_being_written_stays_until_its_block_is_left(mortal: ServerProcess) -> None:
    with blocking.open_store(best(mortal)) as store:
        with pytest.raises(StoreUnavailable), store.reserve({"key": 1_000_000}) as views:  # noqa: PT012
            mortal.kill()
            while sum(kept()) > 17 * 1024 * 1024:
                os.sched_yield()
            views[0][:] = bytes(1_000_000)
        del views
        gc.collect()
        until_nothing_is_kept()


def test_a_connection_that_was_in_use_when_the_server_ended_keeps_nothing_afterwards(mortal: ServerProcess) -> None:
    with blocking.open_store(best(mortal)) as store:
        calls = store.calls  # type: ignore[attr-defined]
        store.put_many(LONG)
        store.get_many(LONG)
        taken = calls.pool.idle.pop()
        mortal.kill()
        while calls.mapped_pool is not None and not calls.mapped_pool.closed:
            os.sched_yield()
        calls.pool.give_back(taken)
        until_nothing_is_kept()


def test_a_store_that_is_closed_leaves_no_thread_and_no_descriptor(mortal: ServerProcess) -> None:
    before, threads = len(os.listdir("/proc/self/fd")), set(threading.enumerate())  # earlier tests' end when they like
    with blocking.open_store(best(mortal)) as store:
        store.put_many(LONG)
        assert any(thread.name == "infinistore-watch" for thread in threading.enumerate())
    assert len(os.listdir("/proc/self/fd")) <= before and threads.issuperset(threading.enumerate())
    before -= 1  # the server's standard output
    with blocking.open_store(best(mortal)) as store:
        store.put_many(LONG)
        watches = [thread for thread in threading.enumerate() if thread.name == "infinistore-watch"]
        mortal.kill()
        until_nothing_is_kept()
    for watch in watches:  # one that has found its server ended is the last to hear that it has nothing to do
        watch.join()
    assert len(os.listdir("/proc/self/fd")) <= before and threads.issuperset(threading.enumerate())


@pytest.mark.parametrize("missing", ["thread", "descriptor"])
def test_where_nobody_can_watch_the_next_call_finds_out(
    missing: str, mortal: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread") if missing == "thread" else OSError(24, "Too many open files")

    monkeypatch.setattr("threading.Thread.start" if missing == "thread" else "os.eventfd", refuse)
    with blocking.open_store(best(mortal)) as store:
        store.put_many(LONG)
        assert store.get_many(LONG) == list(LONG.values())
        mortal.restart()
        while store.get_many(LONG) != [None] * len(LONG):
            pass
        store.put_many(LONG)
        assert len(kept()) <= 4
    assert not kept()
