"""The caller's memory, which the server reads and writes by RDMA: not a byte after a
call has ended.
"""

import asyncio

import pytest
import trio

import infinistore
from infinistore import aio, blocking
from infinistore.errors import DeadlineExceeded
from tests.clients.rdma_serving import VALUE, best_url, cancel_on_the_way, rdma_url, serving, until_work_is_held
from tests.clients.stores import shorten_deadline
from tests.clients.test_cancellation import cancel_at_each_await


async def test_nothing_is_written_to_the_callers_memory_after_a_cancelled_get() -> None:
    async with serving() as (fabric, server), infinistore.open_store(rdma_url(server)) as store:
        await store.put("a", VALUE)
        target = bytearray(len(VALUE))
        await store.register(target)
        await cancel_on_the_way(fabric, store.get_into, "a", target)
        fabric.release()
        assert not any(target)
        assert fabric.moved_bytes == len(VALUE), "the put, and nothing since"
        assert await store.get("a") == VALUE
    await server.quiet()


async def test_nothing_is_read_from_the_callers_memory_after_a_cancelled_put() -> None:
    async with serving() as (fabric, server), infinistore.open_store(rdma_url(server)) as store:
        source = bytearray(VALUE)
        await store.register(source)
        await cancel_on_the_way(fabric, store.put, "a", source)
        source[:] = bytes(len(source))
        fabric.release()
        assert fabric.moved_bytes == 0
        assert not await store.exists("a")
    await server.quiet()


async def test_a_deadline_ends_a_transfer_and_its_queue_pairs() -> None:
    async with serving() as (fabric, server):
        target = bytearray(len(VALUE))
        async with infinistore.open_store(rdma_url(server)) as store:
            await store.put("a", VALUE)
        async with infinistore.open_store(rdma_url(server)) as store:
            await store.register(target)
            fabric.held = True
            shorten_deadline(store, 0.2)
            with pytest.raises(DeadlineExceeded):
                await store.get_into("a", target)
        fabric.release()
        await server.quiet()
        assert not any(target)
        assert not fabric.queues


async def test_a_thread_that_comes_to_its_deadline_is_not_written_to_afterwards() -> None:
    async with serving() as (fabric, server):
        target = bytearray(len(VALUE))
        async with infinistore.open_store(rdma_url(server)) as store:
            await store.put("a", VALUE)

        def wait_in_vain() -> None:
            with blocking.open_store(rdma_url(server)) as store, store.register(target):
                fabric.held = True
                shorten_deadline(store, 0.2)
                with pytest.raises(DeadlineExceeded):
                    store.get_into("a", target)
                fabric.release()
                assert not any(target)

        await trio.to_thread.run_sync(wait_in_vain)
        await server.quiet()
        assert not any(target)


async def test_a_cancelled_asyncio_call_is_not_written_to_afterwards() -> None:
    async with serving() as (fabric, server):
        target = bytearray(len(VALUE))

        async def cancel_a_get() -> None:
            async with aio.open_store(rdma_url(server)) as store:
                await store.put("a", VALUE)
                await store.register(target)
                fabric.held = True
                fabric.has_work.clear()
                call = asyncio.create_task(store.get_into("a", target))
                await asyncio.to_thread(fabric.has_work.wait, 60)
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
                fabric.release()
                assert not any(target)

        await trio.to_thread.run_sync(asyncio.run, cancel_a_get())
        await server.quiet()
        assert not any(target)


async def test_memory_that_is_unregistered_under_a_transfer_is_not_touched_any_more() -> None:
    async with serving() as (fabric, server), infinistore.open_store(best_url(server)) as store:
        await store.put("a", VALUE)
        target = bytearray(len(VALUE))
        registration = await store.register(target)
        fabric.held = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.get_into, "a", target)
            await until_work_is_held(fabric)
            registration.close()
            moved = fabric.moved_bytes
            fabric.release()
        assert fabric.moved_bytes == moved
        assert target == VALUE, "the call went on without RDMA"


@pytest.mark.parametrize("registered", [True, False])
async def test_a_call_can_be_cancelled_at_each_of_its_waits(registered: bool) -> None:
    async with serving() as (_, server):
        source, target = bytearray(VALUE), bytearray(len(VALUE))
        async with infinistore.open_store(f"{rdma_url(server)}&staging_bytes=5000") as store:
            if registered:
                await store.register(source)
                await store.register(target)

            async def there_and_back() -> None:
                await store.put("a", source)
                assert await store.get_into("a", target) == len(VALUE)
                assert target == VALUE

            async def what_was_put_is_whole() -> None:
                assert await store.get_many(["a"]) in ([None], [VALUE])

            assert await cancel_at_each_await(there_and_back, what_was_put_is_whole) > 1
        await server.quiet()
