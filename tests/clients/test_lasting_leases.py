"""What becomes of memory in place when the rest goes: the store, the server, the
connection, the call, the process.

By shared memory, and embedded. A lease lasts as long as anything made from its views,
and not a moment less.
"""

import gc
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

import infinistore
from infinistore import blocking
from infinistore.client import AsyncStore
from infinistore.errors import DeadlineExceeded, LimitExceeded, StoreUnavailable
from infinistore.server.connection import MOST_OPEN
from tests.bad_days.test_fork import in_child
from tests.clients import own_reading
from tests.clients.on_this_host import best, mapped_pools, open_files, run_client, serving, shm
from tests.clients.shared_serving import Shared, shared_serving
from tests.clients.stores import Loops, shorten_deadline
from tests.clients.test_cancellation import CancelAt, cancel_at_each_await
from tests.server.running import KIB, MIB, until

BLOCKS = {"a": bytes(range(256)) * 800, "b": b"b" * 70_000}
LARGE = {"a": b"a" * (3 * MIB), "b": b"b" * (3 * MIB), "c": b"c" * 10}
pytestmark = pytest.mark.filterwarnings("ignore::infinistore.LeaseStillInUse")


async def arrays_of(store: AsyncStore, *keys: str) -> list[Any]:
    """Arrays that outlive the block of their lease."""
    async with store.lease(list(keys)) as views:
        return [np.frombuffer(view, np.uint8) for view in views if view is not None]


# The store goes


async def test_an_array_outlives_its_store_and_the_connection_closes_with_the_array(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        mapped, before = mapped_pools(), open_files()
        async with infinistore.open_store(shm(tmp_path)) as store:
            await store.put_many(BLOCKS)
            arrays = await arrays_of(store, "a", "b")
            await store.delete(["a", "b"])
        async with infinistore.open_store(shm(tmp_path)) as other:
            for index in range(20):
                await other.put(f"filler {index}", bytes(500 * KIB))
        await server.until(leases=1, clients=1, quarantined_bytes=0)
        assert server.server.telemetry.statistics().connections_open == 1
        assert [array.tobytes() for array in arrays] == list(BLOCKS.values())
        part = arrays[1][:10]
        del arrays
        await server.until(leases=1)
        del part
        await server.quiet()
        assert server.core.statistics().condemned_bytes == 0
        assert mapped_pools() == mapped
        assert open_files() <= before


def test_an_array_outlives_an_embedded_store() -> None:
    mapped = mapped_pools()
    with blocking.open_store(pool_bytes=MIB) as store:
        store.put_many(BLOCKS)
        (array,) = own_reading.arrays_of(store, "a")
    assert array.tobytes() == BLOCKS["a"]
    assert mapped_pools() == mapped + 1
    del array, store
    assert mapped_pools() == mapped


@pytest.mark.parametrize("kind", ["embedded", "shm"])
def test_a_block_that_is_left_after_its_store_was_closed_stores_nothing(one_kind: Shared, kind: str) -> None:
    with one_kind.entered() if kind == "shm" else blocking.open_store(pool_bytes=MIB) as store:
        reservation = store.reserve({"key": 5})
        (view,) = reservation.__enter__()
    view[:] = b"value"
    with pytest.raises(StoreUnavailable, match="closed"):
        reservation.__exit__(None, None, None)
    del view
    one_kind.until(clients=0, reservations=0, keys=0)


# The server is stopped


def test_a_server_that_is_stopped_costs_a_lease_its_deadline_and_older_leases_nothing(
    loops: Loops, one_kind: Shared
) -> None:
    patient = one_kind.open()
    patient.put_many(BLOCKS)
    with one_kind.entered() as store:
        held = own_reading.arrays_of(store, "a")
        shorten_deadline(store, 0.2)
        with loops.trio.stopped():
            with pytest.raises(DeadlineExceeded), store.lease(["b"]):
                pass
            with pytest.raises(DeadlineExceeded), store.reserve({"c": 10}):
                pass
        patient.delete(["a", "b"])
        patient.put("b", bytes(MIB))
        assert held[0].tobytes() == BLOCKS["a"]
        assert patient.stats().store.leases >= 1
        del held
    one_kind.until(clients=1, reservations=0, leases=0, condemned_bytes=0)


def test_releases_that_a_stopped_server_does_not_read_are_sent_later(loops: Loops, one_kind: Shared) -> None:
    store = one_kind.open(known_blocks=0)
    store.put("a", b"x" * 2000)
    held = [own_reading.arrays_of(store, "a") for _ in range(900)]
    with loops.trio.stopped():
        held.clear()
    while store.stats().store.leases:
        pass
    assert store.get("a") == b"x" * 2000


# Calls and connections


async def put(store: AsyncStore) -> None:
    await store.put("new", LARGE["a"])


async def reserve(store: AsyncStore) -> None:
    async with store.reserve({"new": len(LARGE["a"])}) as views:
        views[0][:] = LARGE["a"]
        await trio.lowlevel.checkpoint()
        del views


async def get(store: AsyncStore) -> None:
    assert await store.get_many(LARGE) == list(map(bytearray, LARGE.values()))


async def get_into(store: AsyncStore) -> None:
    buffers = [bytearray(len(value)) for value in LARGE.values()]
    await store.get_many_into(list(zip(LARGE, buffers, strict=True)))
    assert buffers == list(LARGE.values())


async def lease(store: AsyncStore) -> None:
    async with store.lease(list(LARGE), verify=True) as views:
        assert all(views)
        await trio.lowlevel.checkpoint()
        del views


@pytest.mark.parametrize("older", [False, True], ids=["", "with an older lease"])
@pytest.mark.parametrize("call", [put, reserve, get, get_into, lease])
async def test_a_call_that_is_cancelled_anywhere_leaves_nothing_pinned_but_what_is_in_use(
    tmp_path: Path, call: Callable[[AsyncStore], Awaitable[None]], older: bool
) -> None:
    async with serving(tmp_path, prealloc_bytes=16 * MIB) as server, infinistore.open_store(best(server)) as keeper:
        await keeper.put_many(LARGE)
        held: list[Any] = []

        async def use() -> None:
            async with infinistore.open_store(best(server), inline_bytes=0, copy_threads=1) as store:
                if older:
                    held.extend(await arrays_of(store, "c"))
                for _ in range(3):  # what it has read is read again without asking
                    await call(store)

        async def after() -> None:
            await until(lambda: (found := server.core.statistics()).leases + found.reservations <= bool(held))
            assert [array.tobytes() for array in held] == [LARGE["c"]] * bool(held)
            held.clear()
            await until(lambda: server.server.telemetry.statistics().connections_open == 1)
            await server.until(leases=0, reservations=0, pinned_bytes=0, quarantined_bytes=0)
            assert await keeper.get_many(["new"]) in ([None], [bytearray(LARGE["a"])])
            assert await keeper.get("c") == LARGE["c"]

        before = open_files()
        assert await cancel_at_each_await(use, after) > 7
        assert open_files() <= before + 1


async def give_up_a_lease(store: AsyncStore, key: str) -> None:
    """Ask for a lease, and be cancelled as soon as it was asked for."""
    with trio.CancelScope() as scope:
        instrument = CancelAt(scope, 1)
        trio.lowlevel.add_instrument(instrument)
        try:
            async with store.lease([key]):
                raise AssertionError("the call was to be cancelled")
        finally:
            trio.lowlevel.remove_instrument(instrument)
    assert scope.cancelled_caught


async def test_a_lease_call_that_is_given_up_does_not_take_older_leases_of_its_connection_with_it(
    tmp_path: Path,
) -> None:
    # It asks the server in any case: what needs no answer is not given up.
    async with serving(tmp_path) as server, infinistore.open_store(shm(tmp_path), known_blocks=0) as store:
        await store.put_many(BLOCKS)
        held = await arrays_of(store, "a")
        await give_up_a_lease(store, "b")
        await store.purge()
        for index in range(20):
            await store.put(f"filler {index}", bytes(500 * KIB))
        assert held[0].tobytes() == BLOCKS["a"]
        newer = await arrays_of(store, "filler 19")  # by another connection
        assert newer[0].tobytes() == bytes(500 * KIB)
        held.clear()
        await server.until(leases=1)
        newer.clear()
        await server.until(leases=0)


async def test_a_lease_call_that_is_given_up_before_it_asks_for_a_lease_takes_no_older_one_with_it(
    tmp_path: Path,
) -> None:
    # It knows the block, and asks for the tables by which it reads it by itself.
    async with (
        serving(tmp_path) as server,
        infinistore.open_store(f"unix://{tmp_path}/store.sock") as other,
        infinistore.open_store(shm(tmp_path)) as store,
    ):
        await other.put_many(BLOCKS)
        held = await arrays_of(store, "a")
        await give_up_a_lease(store, "a")
        await other.purge()
        for index in range(20):
            await other.put(f"filler {index}", bytes(500 * KIB))
        assert held[0].tobytes() == BLOCKS["a"]
        held.clear()
        await server.until(leases=0)


async def test_too_many_leases_on_one_connection_are_refused_and_later_ones_are_not(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, infinistore.open_store(shm(tmp_path), known_blocks=0) as store:
        await store.put("a", b"x" * KIB)
        held = [await arrays_of(store, "a") for _ in range(MOST_OPEN)]
        with pytest.raises(LimitExceeded, match="release them"):
            await arrays_of(store, "a")
        del held[7:]
        held.append(await arrays_of(store, "a"))
        await store.exists("a")  # the server lags behind: what it had no room for is sent with the next call
        await server.until(leases=8)
        held.clear()
        await server.until(leases=0)


async def test_open_blocks_take_no_turns_of_other_calls(tmp_path: Path) -> None:
    """With one connection for blocks, a call inside a block would wait for ever if the
    block kept it.
    """
    async with serving(tmp_path), infinistore.open_store(shm(tmp_path), max_connections=1) as store:
        async with store.reserve({"a": 3}) as (a,), store.lease(["a"]), store.reserve({"b": 3}) as (b,):
            await store.put("c", b"ccc")
            a[:], b[:] = b"aaa", b"bbb"
        assert await store.get_many(["a", "b", "c"]) == [bytearray(b"aaa"), bytearray(b"bbb"), bytearray(b"ccc")]


async def test_connections_are_used_again_after_leases_and_reservations(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, infinistore.open_store(shm(tmp_path)) as store:
        await store.put_many(BLOCKS)
        for _ in range(20):
            async with store.lease(["a"]):
                await store.exists("a")
            async with store.reserve({"c": 2000}) as views:
                await store.get("b")
                views[0][:] = bytes(2000)
            with pytest.raises(KeyError):
                async with store.reserve({"d": 2000}):
                    raise KeyError
        assert server.server.telemetry.statistics().connections_total <= 3


async def test_without_shared_writes_a_reservation_is_of_private_memory(tmp_path: Path) -> None:
    async with serving(tmp_path, shm_writes="off") as server, infinistore.open_store(shm(tmp_path)) as store:
        async with store.reserve({"a": 100_000, "b": 10}) as (a, b):
            assert server.core.statistics().reservations == 0
            a[:], b[:] = b"a" * 100_000, b"b" * 10
        assert await store.get_many(["a", "b"]) == [bytearray(b"a" * 100_000), bytearray(b"b" * 10)]
        async with store.lease(["a"]) as (view,):
            assert view is not None
            assert view[5] == ord("a")
            assert server.core.statistics().leases == 1
            del view


def test_arrays_die_in_many_threads_while_others_lease_and_look_up(loops: Loops) -> None:
    with shared_serving(loops, "threads", prealloc_bytes=16 * MIB) as shared, shared.entered() as store:
        store.put_many(BLOCKS)
        dying: list[list[Any]] = []

        def work(_: int) -> None:
            for _ in range(60):
                dying.append(own_reading.arrays_of(store, "a", "b"))
                assert dying[-1][0][77] == 77
                store.exists("a")
                with store.reserve({"c": 3}) as views:
                    views[0][:] = b"abc"
                if len(dying) > 5:
                    del dying[:3]

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(work, range(4)))
        dying.clear()
        while store.stats().store.leases:
            pass


# Processes


@pytest.mark.process
@pytest.mark.parametrize("kind", ["embedded", "shm"])
def test_a_forked_child_lets_go_of_leases_and_reservations_without_a_trace(one_kind: Shared, kind: str) -> None:
    with one_kind.entered() if kind == "shm" else blocking.open_store(pool_bytes=MIB) as store:
        store.put_many(BLOCKS)
        held = own_reading.arrays_of(store, "a")
        reservation = store.reserve({"new": 70_000})
        (view,) = reservation.__enter__()
        view[:] = b"n" * 70_000

        def check() -> None:
            for call in (lambda: store.lease(["a"]).__enter__(), lambda: store.reserve({"c": 1}).__enter__()):
                with pytest.raises(StoreUnavailable, match="fork"):
                    call()
            held.clear()
            with pytest.raises(StoreUnavailable, match="fork"):
                reservation.__exit__(None, None, None)
            gc.collect()

        in_child(check)
        store.delete(["a"])
        for index in range(4):
            store.put(f"filler {index}", bytes(200 * KIB))
        assert held[0].tobytes() == BLOCKS["a"]
        reservation.__exit__(None, None, None)
        assert store.get("new") == b"n" * 70_000
        held.clear()
        while store.stats().store.leases:
            pass


@pytest.mark.process
async def test_a_program_that_ends_with_arrays_and_open_blocks_leaves_nothing_behind(tmp_path: Path) -> None:
    code = """
    store.put("a", bytes(100_000))
    lease = store.lease(["a"])
    kept = [view[5:] for view in lease.__enter__()]
    reservation = store.reserve({"b": 100_000})
    (view,) = reservation.__enter__()
    with blocking.open_store(pool_bytes=1 << 20) as embedded:
        embedded.put("a", b"abc")
        with embedded.lease(["a"]) as views:
            array = memoryview(views[0])
    print(bytes(array).decode(), flush=True)
    sys.stdin.read()
"""
    async with serving(tmp_path) as server:
        client = run_client(shm(tmp_path), code)
        assert client.stdout is not None
        assert await trio.to_thread.run_sync(client.stdout.readline) == b"abc\n"
        statistics = server.core.statistics()
        assert (statistics.leases, statistics.reservations) == (1, 1)
        await trio.to_thread.run_sync(client.communicate)
        await server.quiet()
        assert (client.returncode, server.core.keys()) == (0, ["a"])
