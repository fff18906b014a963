"""Calls that are cancelled: they let go of the caller's memory at once, and leave the
connection good for the next.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import uvloop

from infinistore import InfinityConnection
from infinistore.dropin.registered_server import RegisteredServer
from tests.bad_days.faults import Action, Direction, Fault, Proxy, running_proxy
from tests.dropin.conftest import config_for, connected, pointer, register, running_server
from tests.server.running import MIB

SIZE = 12 * MIB
BLOCKS = [(f"key{number}", number * MIB) for number in range(12)]


async def cancelled_half_way(
    connection: InfinityConnection, memory: bytearray, may_cancel: Callable[[], Awaitable[Any]]
) -> bytes:
    """Start to read into the memory, and cancel that once some has come. Returns what
    is there then.
    """
    task = asyncio.ensure_future(connection.rdma_read_cache_async(BLOCKS, MIB, pointer(memory)))
    await may_cancel()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    there = bytes(memory)
    assert there.startswith(b"v")
    assert not there.endswith(b"v")
    return there


@pytest.fixture
def server() -> Iterator[RegisteredServer]:
    with running_server(unix_socket="off", prealloc_bytes=32 * MIB) as running:
        yield running


@pytest.fixture
def proxy(server: RegisteredServer) -> Iterator[Proxy]:
    with running_proxy(("127.0.0.1", server.addresses.port)) as proxy:
        yield proxy


NEW_LOOPS: list[Callable[[], Any]] = [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.mark.parametrize("new_loop", NEW_LOOPS)
def test_what_arrives_after_a_read_was_cancelled_does_not_reach_its_memory(
    proxy: Proxy, new_loop: Callable[[], Any]
) -> None:
    memory, other = bytearray(SIZE), bytearray(b"v" * SIZE)

    async def stalled() -> None:
        await asyncio.to_thread(proxy.struck.wait)
        while not memory[0]:  # noqa: ASYNC110 - memory sets no event, and the client has yet to receive it
            await asyncio.sleep(0)

    async def run(connection: InfinityConnection) -> None:
        problems: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, problem: problems.append(problem))
        proxy.arm(Fault(Action.STALL, Direction.REPLY, SIZE // 2))

        there = await cancelled_half_way(connection, memory, stalled)
        proxy.release()
        await connection.rdma_read_cache_async(BLOCKS, MIB, pointer(other))

        assert memory == there
        assert other == b"v" * SIZE
        assert problems == []

    with connected(proxy.port) as connection, asyncio.Runner(loop_factory=new_loop) as runner:
        register(connection, memory), register(connection, other)
        runner.run(connection.rdma_write_cache_async(BLOCKS, MIB, pointer(other)))
        other[:] = bytes(SIZE)
        runner.run(run(connection))


def test_a_read_by_shared_memory_that_is_cancelled_copies_no_more(tmp_path: Any) -> None:
    memory, other = bytearray(SIZE), bytearray(b"v" * SIZE)

    async def begun() -> None:
        while not memory[0]:  # noqa: ASYNC110 - memory sets no event
            await asyncio.sleep(0)

    async def run(connection: InfinityConnection) -> None:
        await connection.rdma_write_cache_async(BLOCKS, MIB, pointer(other))
        there = await cancelled_half_way(connection, memory, begun)

        await connection.rdma_read_cache_async(BLOCKS, MIB, pointer(other))

        assert memory == there

    with (
        running_server(unix_socket=str(tmp_path / "s")) as server,
        connected(server.addresses.port) as connection,
    ):
        assert connection.transport == "shm"
        register(connection, memory), register(connection, other)
        asyncio.run(run(connection))


def test_a_write_that_is_cancelled_is_not_there_and_its_memory_can_be_used_again(proxy: Proxy) -> None:
    memory = bytearray(b"a" * SIZE)

    async def run(connection: InfinityConnection) -> None:
        proxy.arm(Fault(Action.STALL, Direction.REQUEST, SIZE // 4))
        blocks = [("key", 0)]
        task = asyncio.ensure_future(connection.rdma_write_cache_async(blocks, SIZE, pointer(memory)))
        await asyncio.to_thread(proxy.struck.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        memory[:] = b"b" * SIZE
        proxy.release()

        assert connection.check_exist("key") is False
        await connection.rdma_write_cache_async(blocks, SIZE, pointer(memory))
        await connection.rdma_read_cache_async(blocks, SIZE, pointer(memory))
        assert memory == b"b" * SIZE

    with connected(proxy.port) as connection:
        register(connection, memory)
        asyncio.run(run(connection))


def test_connecting_can_be_cancelled(proxy: Proxy) -> None:
    async def run(connection: InfinityConnection) -> None:
        proxy.arm(Fault(Action.STALL, Direction.REPLY, 0))
        task = asyncio.ensure_future(connection.connect_async())
        await asyncio.to_thread(proxy.struck.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not connection.rdma_connected
        proxy.disarm()
        await connection.connect_async()
        assert connection.check_exist("key") is False

    with InfinityConnection(config_for(proxy.port)) as connection:
        asyncio.run(run(connection))


def test_closing_does_not_disturb_a_call_that_is_under_way(proxy: Proxy) -> None:
    memory = bytearray(b"v" * SIZE)

    async def run(connection: InfinityConnection) -> None:
        await connection.rdma_write_cache_async(BLOCKS, MIB, pointer(memory))
        memory[:] = bytes(SIZE)
        proxy.arm(Fault(Action.STALL, Direction.REPLY, SIZE // 2))
        task = asyncio.ensure_future(connection.rdma_read_cache_async(BLOCKS, MIB, pointer(memory)))
        await asyncio.to_thread(proxy.struck.wait)

        connection.close()
        proxy.release()

        assert await task == 200
        assert memory == b"v" * SIZE

    with connected(proxy.port) as connection:
        register(connection, memory)
        asyncio.run(run(connection))
