"""The asyncio client, cancelled at each of its waits: as `test_cancellation.py` does
for Trio.

The loop's waits for a socket are counted, and the call is cancelled in one after the
other.
"""

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from infinistore import aio
from infinistore.client import AsyncStore
from infinistore.client.drivers.asyncio_driver import Slots
from infinistore.errors import StoreUnavailable
from infinistore.transports.sockets import asyncio_streams as asyncio_sockets
from tests.clients.event_loops import Loops, under_asyncio
from tests.server.running import MIB, RunningServer, make_config, running_server

KEYS = ["a", "b", "c"]
SIZE = 2 * MIB


class CancelAt:
    """Counts what `task` may wait for, and cancels it in the `step`-th of that:
    reading, writing, and before either.

    Before, because the server is so quick at times that there is nothing to wait for.
    """

    def __init__(self) -> None:
        self.task: asyncio.Task[Any] | None = None
        self.steps_left = 0
        self.fired = False

    def around(self, wait: Callable[..., Awaitable[Any]], *, pause: bool) -> Callable[..., Awaitable[Any]]:
        async def counted(*arguments: Any) -> Any:
            if asyncio.current_task() is self.task:
                self.steps_left -= 1
                if self.steps_left == 0:
                    self.fired = True
                    assert self.task is not None
                    asyncio.get_running_loop().call_soon(self.task.cancel)
                if pause:
                    await asyncio.sleep(0)
            return await wait(*arguments)

        return counted


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> CancelAt:
    cancel = CancelAt()
    for name in ("_readable", "_writable"):
        monkeypatch.setattr(asyncio_sockets, name, cancel.around(getattr(asyncio_sockets, name), pause=False))
    stream = asyncio_sockets.AsyncioSocketStream
    for name in ("receive_into", "send_all"):
        monkeypatch.setattr(stream, name, cancel.around(getattr(stream, name), pause=True))
    return cancel


async def cancel_at_each_wait(
    waits: CancelAt, call: Callable[[], Awaitable[Any]], after: Callable[[], Awaitable[None]]
) -> int:
    cancelled = 0
    for step in itertools.count(1):

        async def run() -> None:
            await call()

        task = asyncio.create_task(run())
        waits.task, waits.steps_left, waits.fired = task, step, False
        await asyncio.wait([task])
        waits.task = None
        if task.cancelled():
            cancelled += 1
        else:
            task.result()
        await after()
        if not waits.fired:
            break
    return cancelled


@pytest.fixture
def server(loops: Loops) -> Iterator[RunningServer]:
    with loops.trio.entered(running_server) as running:
        yield running


@asynccontextmanager
async def opened(server: RunningServer, loops: Loops) -> AsyncGenerator[AsyncStore, None]:
    """A store; after it nothing is pinned on the server."""
    async with aio.open_store(server.url, spin_us=0) as store:
        yield store
    await asyncio.to_thread(loops.trio.run, server.quiet)


@under_asyncio
async def test_a_put_that_is_cancelled_stores_all_of_its_batch_or_nothing(
    server: RunningServer, loops: Loops, waits: CancelAt
) -> None:
    size = SIZE // 4
    async with opened(server, loops) as store:
        before: dict[str, Any] = {key: bytes(size) for key in KEYS}
        await store.put_many(before)
        written: dict[str, Any] = {}
        version = 0

        async def put() -> None:
            nonlocal written, version
            version += 1
            written = {key: bytes([version % 256]) * size for key in KEYS}
            await store.put_many(written)

        async def look() -> None:
            nonlocal before
            values: dict[str, Any] = dict(zip(KEYS, await store.get_many(KEYS), strict=True))
            assert values in (before, written)
            before = values

        assert await cancel_at_each_wait(waits, put, look) >= 2


@under_asyncio
async def test_a_get_that_is_cancelled_leaves_no_half_read_connection(
    server: RunningServer, loops: Loops, waits: CancelAt
) -> None:
    async with opened(server, loops) as store:
        stored: dict[str, Any] = {key: key.encode() * (SIZE // 4) for key in KEYS}
        await store.put_many(stored)
        buffers = {key: bytearray(SIZE // 4) for key in KEYS}

        async def get() -> None:
            assert await store.get_many([*KEYS, "missing"]) == [*stored.values(), None]
            assert await store.get_many_into(buffers) == [SIZE // 4] * 3

        async def look() -> None:
            for buffer in buffers.values():
                buffer[:] = bytes(len(buffer))
            assert await store.get_many(["b"]) == [stored["b"]]
            assert await store.exists_many(["a", "missing"]) == [True, False]
            assert not any(map(any, buffers.values()))

        assert await cancel_at_each_wait(waits, get, look) >= 2


@under_asyncio
async def test_opening_that_is_cancelled_leaves_no_connection(
    server: RunningServer, loops: Loops, waits: CancelAt
) -> None:
    async def open_and_close() -> None:
        async with aio.open_store(server.url, spin_us=0) as store:
            await store.put("a", b"abc")

    async def look() -> None:
        await asyncio.to_thread(loops.trio.run, server.quiet)

    assert await cancel_at_each_wait(waits, open_and_close, look) >= 4


@under_asyncio
async def test_calls_in_line_leave_it_when_they_are_cancelled(server: RunningServer, loops: Loops) -> None:
    async with aio.open_store(server.url, max_connections=1) as store:
        await store.put("large", bytes(MIB))
        for _ in range(5):
            tasks = [asyncio.create_task(store.get("large")) for _ in range(10)]
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        assert await store.get_many(["large"]) == [bytearray(MIB)]


def test_a_store_may_be_used_in_another_loop_than_that_which_opened_it(server: RunningServer, loops: Loops) -> None:
    """Also after a loop that used it is over: what was connected there goes on
    elsewhere.
    """
    with loops.asyncio.entered(lambda: aio.open_store(server.url)) as store:
        asyncio.run(store.put("a", b"abc"))
        assert bytes(asyncio.run(store.get("a"))) == b"abc"
        loops.asyncio.run(store.put, "b", b"def")
        assert bytes(asyncio.run(store.get("b"))) == b"def"
    with pytest.raises(StoreUnavailable):
        asyncio.run(store.get("a"))


@pytest.mark.parametrize("dropped", [False, True], ids=["kept", "dropped"])
def test_a_loop_that_is_closed_with_its_turn_on_the_way_takes_no_slot_with_it(dropped: bool) -> None:
    slots = Slots(1)
    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()
    first.run_until_complete(slots.__aenter__())
    waiting = second.create_task(slots.__aenter__())
    second.run_until_complete(asyncio.sleep(0))
    first.run_until_complete(slots.__aexit__())  # the slot is on its way to the second loop, which will not run again
    second.close()
    first.close()
    if dropped:  # and its coroutine is closed
        waiting.get_coro().close()
    waiting._log_destroy_pending = False  # type: ignore[attr-defined]

    async def take() -> None:
        for _ in range(2):
            async with asyncio.timeout(20), slots:
                pass

    asyncio.run(take())
    assert slots.free == 1


def test_who_waits_in_line_has_the_slot_of_a_loop_that_was_closed() -> None:
    """Two loops in two threads: one is closed while it has a turn, the other
    one waits.
    """
    slots = Slots(1, look_again_s=0.01)
    closed = asyncio.new_event_loop()
    closed.run_until_complete(slots.__aenter__())
    turn_given = threading.Event()
    over: list[bool] = []

    async def wait() -> None:
        in_line = asyncio.ensure_future(slots.__aenter__())
        await asyncio.sleep(0)
        turn_given.set()
        async with asyncio.timeout(20):
            await in_line
        await slots.__aexit__()
        over.append(True)

    waiting = closed.create_task(slots.__aenter__())
    closed.run_until_complete(asyncio.sleep(0))
    closed.run_until_complete(slots.__aexit__())
    thread = threading.Thread(target=lambda: asyncio.run(wait()))
    thread.start()
    turn_given.wait(60)
    closed.close()
    waiting._log_destroy_pending = False  # type: ignore[attr-defined]
    thread.join()
    assert waiting.get_loop() is closed  # and nothing of it was collected meanwhile
    assert over and slots.free == 1


def test_a_lease_and_a_reservation_by_shared_memory_that_are_cancelled_keep_nothing(
    loops: Loops, waits: CancelAt, tmp_path: Path
) -> None:
    config = make_config(unix_socket=str(tmp_path / "store.sock"))

    async def main(server: RunningServer) -> None:
        async with aio.open_store(f"shm://{server.unix_path}", spin_us=0) as store:
            stored = dict.fromkeys(KEYS, b"x" * 100_000)
            await store.put_many(stored)

            async def use() -> None:
                async with store.lease(KEYS, verify=True) as views, store.reserve({"new": 100_000}) as room:
                    assert [view and bytes(view) for view in views] == list(stored.values())
                    room[0][:] = b"n" * 100_000
                    del views, room

            async def look() -> None:
                assert await store.get_many(["new"]) in ([None], [bytearray(b"n" * 100_000)])
                await store.delete(["new"])
                statistics = (await store.stats()).store
                while statistics.leases or statistics.reservations:  # given back by other connections than this
                    statistics = (await store.stats()).store

            assert await cancel_at_each_wait(waits, use, look) >= 2
        await asyncio.to_thread(loops.trio.run, server.quiet)

    with loops.trio.entered(lambda: running_server(config)) as server:
        asyncio.run(main(server))
