"""A call that is cancelled, at any of its awaits: nothing partial is seen, nothing
stays pinned, the store goes on.

The same call runs again and again, and is cancelled at its first await, its second, and
so on, until it gets through.
"""

import itertools
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

import infinistore
from infinistore.client import AsyncStore
from infinistore.core import StoreCore
from infinistore.protocol.shared_tables import tables_are_safe_here
from tests.clients.stores import simulated_store
from tests.server.running import KIB, MIB, RunningServer, make_config, running_server, until

KEYS = ["a", "b", "c"]


class CancelAt(trio.abc.Instrument):
    """Cancels `scope` when the current task has come to its `step`-th await that lets
    others run.
    """

    def __init__(self, scope: trio.CancelScope, step: int) -> None:
        self._task = trio.lowlevel.current_task()
        self._scope = scope
        self._steps_left = step
        self.fired = False

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self._task:
            self._steps_left -= 1
            if not self._steps_left:
                self.fired = True
                self._scope.cancel()


async def cancel_at_each_await(call: Callable[[], Awaitable[Any]], after: Callable[[], Awaitable[None]]) -> int:
    """Run `call` until it is not cancelled any more; return how often it was. `after`
    looks at what each run left.
    """
    cancelled = 0
    for step in itertools.count(1):
        with trio.CancelScope() as scope:
            instrument = CancelAt(scope, step)
            trio.lowlevel.add_instrument(instrument)
            try:
                await call()
            finally:
                trio.lowlevel.remove_instrument(instrument)
        cancelled += scope.cancelled_caught
        await after()
        if not instrument.fired:
            break
    return cancelled


class Situation:
    """A store, and what to expect of it whatever was cancelled."""

    def __init__(self, store: AsyncStore, core: StoreCore, server: RunningServer | None) -> None:
        self.store = store
        self.core = core
        self.server = server
        self.version = 0

    def batch(self, size: int) -> dict[str, Any]:
        self.version += 1
        return {key: (f"{key}{self.version} ".encode() * size)[:size] for key in KEYS}

    async def settle(self) -> None:
        """Nothing is pinned, and the server has as many clients as there are
        connections.
        """

        def connections() -> int:  # an embedded store has one client of its own, for what is in place
            return 1 if self.server is None else self.server.server.telemetry.statistics().connections_open

        def settled() -> bool:
            found = self.core.statistics()
            return not (found.reservations or found.leases) and found.clients <= connections()

        await until(settled)
        statistics = self.core.statistics()
        assert statistics.reserved_bytes == statistics.pinned_bytes - statistics.held_bytes == 0
        assert connections() <= 10


@asynccontextmanager
async def situation(kind: str) -> AsyncGenerator[Situation, None]:
    config = make_config(prealloc_bytes=32 * MIB)
    if kind == "embedded":
        async with infinistore.open_store(pool_bytes=32 * MIB) as store:
            yield Situation(store, store.embedded.core, None)  # type: ignore[attr-defined]
    elif kind == "simulated":
        async with simulated_store(config, seed=7) as (store, server):
            yield Situation(store, server.core, server)
            await store.purge()
    elif kind.startswith("shared memory"):
        with tempfile.TemporaryDirectory() as folder:
            config = make_config(prealloc_bytes=32 * MIB, unix_socket=f"{folder}/store.sock")
            url = f"shm://{folder}/store.sock"
            known_blocks = 0 if kind.endswith("asking") else 1000
            async with (
                running_server(config) as server,
                infinistore.open_store(url, known_blocks=known_blocks) as store,
            ):
                yield Situation(store, server.core, server)
    else:
        async with running_server(config) as server, infinistore.open_store(server.url) as store:
            yield Situation(store, server.core, server)


SIZES = {
    "embedded": 3 * MIB,
    "simulated": 3000,
    "sockets": 2 * MIB,
    "shared memory": 3 * MIB,
    "shared memory, asking": 3 * MIB,
}
kinds = pytest.mark.parametrize("kind", SIZES)


async def put(store: AsyncStore, values: dict[str, Any]) -> None:
    await store.put_many(values)


async def reserve(store: AsyncStore, values: dict[str, Any]) -> None:
    async with store.reserve({key: len(value) for key, value in values.items()}) as views:
        await trio.lowlevel.checkpoint()
        for view, value in zip(views, values.values(), strict=True):
            view[:] = value
        await store.exists("a")
        del view, views


@kinds
@pytest.mark.parametrize("write", [put, reserve])
async def test_a_write_that_is_cancelled_stores_all_of_its_batch_or_nothing(
    kind: str, write: Callable[[AsyncStore, dict[str, Any]], Awaitable[None]]
) -> None:
    async with situation(kind) as it:
        before = it.batch(SIZES[kind])
        await it.store.put_many(before)
        written: dict[str, Any] = {}

        async def write_anew() -> None:
            nonlocal written
            written = it.batch(SIZES[kind])
            await write(it.store, written)

        async def look() -> None:
            nonlocal before
            await it.settle()
            values: dict[str, Any] = dict(zip(KEYS, await it.store.get_many(KEYS), strict=True))
            assert values in (before, written)
            before = values

        assert await cancel_at_each_await(write_anew, look) >= 1 + (write is reserve)
        assert before == written
        if (kind, write) == ("shared memory", put) and it.server is not None:
            by_itself = any(one.kind == "prepare" for one in it.server.server.context.recorder.statistics())
            assert by_itself == tables_are_safe_here()


@kinds
async def test_a_put_without_replacing_that_is_cancelled_stores_all_or_nothing(kind: str) -> None:
    async with situation(kind) as it:
        written = it.batch(SIZES[kind])

        async def put() -> None:
            await it.store.put_many(written, replace=False)

        async def look() -> None:
            await it.settle()
            assert await it.store.exists_many(KEYS) in ([True] * 3, [False] * 3)
            await it.store.delete(KEYS)

        assert await cancel_at_each_await(put, look) >= 2


@kinds
async def test_a_get_that_is_cancelled_leaves_no_pin_and_no_half_read_connection(kind: str) -> None:
    async with situation(kind) as it:
        stored = it.batch(SIZES[kind])
        await it.store.put_many(stored)

        async def get() -> None:
            assert await it.store.get_many([*KEYS, "missing"]) == [*stored.values(), None]

        async def look() -> None:
            await it.settle()
            assert await it.store.get("b") == stored["b"]
            assert await it.store.exists_many(["a", "missing"]) == [True, False]

        assert await cancel_at_each_await(get, look) >= 1


@kinds
async def test_a_get_into_buffers_that_is_cancelled_writes_to_them_no_more(kind: str) -> None:
    async with situation(kind) as it:
        stored = it.batch(SIZES[kind])
        await it.store.put_many(stored)
        buffers = {key: bytearray(SIZES[kind]) for key in KEYS}

        async def get() -> None:
            assert await it.store.get_many_into(buffers) == [SIZES[kind]] * 3

        async def look() -> None:
            await it.settle()
            for buffer in buffers.values():
                buffer[:] = bytes(len(buffer))
            assert await it.store.get_many(KEYS) == list(stored.values())
            assert not any(map(any, buffers.values()))

        # What is known is read without waiting for anybody: there is nothing to be
        # given up.
        assert await cancel_at_each_await(get, look) >= (kind != "shared memory")


@kinds
async def test_a_lease_that_is_cancelled_inside_or_before_its_block_pins_nothing(kind: str) -> None:
    async with situation(kind) as it:
        stored = it.batch(SIZES[kind])
        await it.store.put_many(stored)

        async def lease() -> None:
            async with it.store.lease([*KEYS, "missing"], verify=True) as views:
                await trio.lowlevel.checkpoint()
                assert views == [*stored.values(), None]
                del views

        async def look() -> None:
            await it.settle()
            assert await it.store.get("b") == stored["b"]

        assert await cancel_at_each_await(lease, look) >= 2


CALLS: list[Callable[[AsyncStore], Awaitable[Any]]] = [
    lambda store: store.exists_many(KEYS),
    lambda store: store.match_prefix(KEYS),
    lambda store: store.match_prefix(KEYS, hold_s=0.01),
    lambda store: store.release_hold("0:1"),
    lambda store: store.keys(),
    lambda store: store.delete(["missing"]),
    lambda store: store.evict(1, 1),
    lambda store: store.stats(),
]


@kinds
async def test_any_other_call_that_is_cancelled_leaves_the_store_usable(kind: str) -> None:
    async with situation(kind) as it:
        stored = it.batch(100)
        await it.store.put_many(stored)

        async def look() -> None:
            await it.settle()
            assert await it.store.get_many(KEYS) == list(stored.values())

        for call in CALLS:
            await cancel_at_each_await(lambda call=call: call(it.store), look)  # type: ignore[misc]


async def test_a_cancelled_call_that_waits_for_its_turn_takes_none() -> None:
    """One connection for blocks, and more calls than that: those in line leave it when
    they are cancelled.
    """
    async with running_server() as server, infinistore.open_store(server.url, max_connections=1) as store:
        await store.put("large", bytes(MIB))
        for _ in range(5):
            async with trio.open_nursery() as nursery:
                for _ in range(10):
                    nursery.start_soon(store.get, "large")
                await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
        assert await store.get("large") == bytes(MIB)
        assert server.server.telemetry.statistics().connections_open <= 3


async def test_many_tasks_on_one_store_some_of_them_cancelled() -> None:
    async with running_server() as server, infinistore.open_store(server.url) as store:

        async def work(number: int) -> None:
            key = f"key {number}"
            value: Any = bytes([number]) * (number * KIB + 1)
            with trio.CancelScope() as scope:
                instrument = CancelAt(scope, number % 7 + 1)
                if number % 3 == 0:
                    trio.lowlevel.add_instrument(instrument)
                try:
                    await store.put(key, value)
                    assert await store.get(key) == value
                finally:
                    if number % 3 == 0:
                        trio.lowlevel.remove_instrument(instrument)
            (found,) = await store.get_many([key])
            assert found in (None, value)
            if number % 3:
                assert found == value

        async with trio.open_nursery() as nursery:
            for number in range(60):
                nursery.start_soon(work, number)
