"""Memory of a GPU that is put from and read into by RDMA, over a GPU and devices made
of memory copies.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import torch
import trio
from torch._subclasses.fake_tensor import FakeTensorMode

import infinistore
from infinistore import aio, blocking
from infinistore.errors import BufferTooSmall, DeviceMemoryUnreachable, KeyNotFound, TransferFailed
from infinistore.transports.rdma.verbs import NoRdma
from tests.clients.rdma_serving import VALUE, best_url, cancel_on_the_way, rdma_url, serving, until_work_is_held
from tests.clients.stores import damage
from tests.server.running import RunningServer
from tests.transports.fake_gpu import FakeGpu, gpu_in_use
from tests.transports.fake_rdma import Fabric

REMOTE_ACCESS = 10
SIZE = len(VALUE)


@asynccontextmanager
async def with_gpu(**settings: Any) -> AsyncGenerator[tuple[Fabric, RunningServer, FakeGpu], None]:
    async with serving(**settings) as (fabric, server):
        with gpu_in_use(fabric) as gpu:
            yield fabric, server, gpu
        await server.quiet()


def filled(gpu: FakeGpu, content: bytes = VALUE) -> torch.Tensor:
    tensor = gpu.tensor(len(content))
    gpu.write(tensor, content)
    return tensor


# There and back


async def test_blocks_go_straight_between_a_gpu_and_the_pool() -> None:
    async with with_gpu() as (fabric, server, gpu), infinistore.open_store(rdma_url(server)) as store:
        source, target = filled(gpu), gpu.tensor(SIZE)
        known = fabric.registered_bytes
        with await store.register(source) as one, await store.register(target) as other:
            assert one.registered and other.registered
            half = SIZE // 2
            await store.put_many({"a": source[:half], "b": source[half:]})
            assert await store.get_many_into({"b": target[half:], "a": target[:half]}) == [half, half]
            assert gpu.read(target) == VALUE
            assert fabric.registered_bytes == known + 2 * SIZE, "nothing was staged"
            assert await store.get("a") == VALUE[:half], "the same block by way of the host"
        assert (await store.stats()).transport == "rdma"


async def test_a_block_of_one_byte_goes_by_rdma_too() -> None:
    async with (
        with_gpu() as (_, server, gpu),
        infinistore.open_store(rdma_url(server).replace("inline_bytes=0&", "")) as store,
    ):
        tensor = filled(gpu, b"x")
        await store.register(tensor)
        await store.put("a", tensor)
        gpu.write(tensor, b"-")
        assert await store.get_into("a", tensor) == 1
        assert gpu.read(tensor) == b"x"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.complex64])
async def test_elements_are_of_any_type(dtype: torch.dtype) -> None:
    async with with_gpu() as (_, server, gpu), infinistore.open_store(rdma_url(server)) as store:
        tensor = gpu.tensor(4, 16, dtype=dtype)
        gpu.write(tensor, VALUE[: tensor.nbytes])
        await store.register(tensor)
        await store.put("a", tensor[1])
        assert await store.get("a") == VALUE[tensor[0].nbytes : 2 * tensor[0].nbytes]


async def test_a_tensor_that_spans_several_allocations_is_exported_whole() -> None:
    """As those of PyTorch's expandable segments: CUDA tells the first piece only, and
    exports all the same.
    """
    async with with_gpu() as (_, server, gpu), infinistore.open_store(rdma_url(server)) as store:
        tensor = filled(gpu)
        ((start, length),) = gpu.library.allocations
        gpu.library.allocations.insert(0, (start, 4096))
        assert length > 4096
        await store.register(tensor)
        await store.put("a", tensor[5000:])
        assert await store.get("a") == VALUE[5000:]


async def test_missing_longer_and_skipped_blocks_are_as_with_other_memory() -> None:
    async with with_gpu() as (_, server, gpu), infinistore.open_store(rdma_url(server)) as store:
        source, target = filled(gpu), gpu.tensor(SIZE)
        await store.register(source)
        await store.register(target)
        assert await store.put_many({"a": source[:100]}) == []
        assert await store.put_many({"a": source[:50], "b": source[:70]}, replace=False) == ["a"]
        wanted = {"a": target[:100], "gone": target[100:200], "b": target[200:400]}
        assert await store.get_many_into(wanted) == [100, None, 70]
        assert gpu.read(target[:100]) == VALUE[:100]
        assert gpu.read(target[100:270]) == bytes(100) + VALUE[:70]
        with pytest.raises(KeyNotFound):
            await store.get_into("gone", target)
        with pytest.raises(KeyNotFound):
            await store.get_many_into(wanted, all_or_nothing=True)
        with pytest.raises(BufferTooSmall):
            await store.get_into("a", target[:99])
        assert await store.get_many_into({"gone": target}) == [None]


async def test_blocks_of_a_gpu_have_no_checksum() -> None:
    async with with_gpu() as (_, server, gpu), infinistore.open_store(rdma_url(server)) as store:
        tensor = filled(gpu)
        await store.register(tensor)
        await store.put("a", tensor)
        damage(server.core, "a")
        changed = bytes([VALUE[0] ^ 1]) + VALUE[1:]
        assert await store.get("a") == changed
        assert await store.get_into("a", tensor) == SIZE
        assert gpu.read(tensor) == changed


# Order


async def test_what_the_gpu_was_told_is_done_before_a_card_reads_or_writes() -> None:
    async with with_gpu() as (_, server, gpu), infinistore.open_store(rdma_url(server)) as store:
        tensor, seen = gpu.tensor(SIZE), []
        await store.register(tensor)
        gpu.told.append(partial(gpu.write, tensor, VALUE))
        await store.put("a", tensor)
        assert await store.get("a") == VALUE
        gpu.told.append(partial(gpu.write, tensor, bytes(SIZE)))
        gpu.told.append(lambda: seen.append(gpu.read(tensor)))
        await store.get_into("a", tensor)
        assert seen == [bytes(SIZE)]
        assert gpu.read(tensor) == VALUE


async def test_a_gpu_that_does_not_see_by_itself_what_was_written_is_told_to() -> None:
    async with with_gpu() as (_, server, gpu), infinistore.open_store(rdma_url(server)) as store:
        tensor = filled(gpu)
        await store.register(tensor)
        assert ("order copies", tensor.data_ptr()) in gpu.library.calls
        await store.put("a", tensor)
        assert ("flush",) not in gpu.library.calls
        await store.get_into("a", tensor)
        assert gpu.library.calls[-1] == ("flush",)


async def test_a_gpu_that_fails_before_its_memory_is_moved_is_a_typed_error() -> None:
    async with with_gpu() as (fabric, server, gpu), infinistore.open_store(rdma_url(server)) as store:
        tensor = filled(gpu)
        await store.register(tensor)

        def fail() -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        gpu.told.append(fail)
        with pytest.raises(DeviceMemoryUnreachable, match="cuda:0 was told before has failed: CUDA error"):
            await store.put("a", tensor)
        assert fabric.moved_bytes == 0


# What cannot be


async def test_a_driver_without_dmabufs_means_peer_memory() -> None:
    async with with_gpu() as (fabric, server, gpu), infinistore.open_store(rdma_url(server)) as store:
        source, target = filled(gpu), gpu.tensor(SIZE)
        fabric.refuses_dmabufs = True
        await store.register(source)
        gpu.library.attributes.clear()
        await store.register(target)
        await store.put("a", source[:99])
        assert await store.get_into("a", target) == 99
        assert gpu.read(target[:99]) == VALUE[:99]


async def test_memory_that_can_be_registered_in_no_way_is_an_error_that_names_both_and_the_remedy() -> None:
    async with with_gpu() as (fabric, server, gpu), infinistore.open_store(rdma_url(server)) as store:
        tensor = filled(gpu)
        fabric.refuses_dmabufs = fabric.refuses_to_register = True
        with pytest.raises(DeviceMemoryUnreachable, match=r"dmabuf .*not supported.* peer memory .*nvidia-peermem"):
            await store.register(tensor)
        with pytest.raises(DeviceMemoryUnreachable, match="not registered"):
            await store.put("a", tensor)
        fabric.refuses_to_register = False
        await store.register(tensor)
        await store.put("a", tensor)


async def test_a_refusal_that_comes_after_register_leaves_rdma_to_others(caplog: pytest.LogCaptureFixture) -> None:
    async with with_gpu() as (fabric, server, gpu):
        fabric.refuses_dmabufs = True
        tensor, device_of = filled(gpu), fabric.open
        async with infinistore.open_store(rdma_url(server), lazy=True) as store:
            registration = await store.register(tensor)
            assert not registration.problem

            def open_without_peer_memory(*args: Any, **place: Any) -> Any:
                device = device_of(*args, **place)
                host_only = device.register

                def register(address: int, length: int, **how: Any) -> Any:
                    if address == tensor.data_ptr():
                        raise NoRdma("Bad address")
                    return host_only(address, length, **how)

                device.register = register  # type: ignore[method-assign]
                return device

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("infinistore.transports.rdma.ibverbs.open_device", open_without_peer_memory)
                await store.put("a", VALUE)
            assert (await store.stats()).transport == "rdma"
            assert not registration.registered
            assert "Bad address" in registration.problem
            assert "Bad address" in repr(registration)
            with pytest.raises(DeviceMemoryUnreachable, match="Bad address"):
                await store.get_into("a", tensor)
        (line,) = [record.getMessage() for record in caplog.records if record.name == "infinistore.client"]
        assert line.startswith("memory of a GPU is not registered for RDMA: ")
        assert "Bad address" in line


async def test_without_rdma_registering_does_nothing_and_moving_is_an_error_that_says_what_would_help() -> None:
    async with with_gpu() as (_, server, gpu):
        tensor = filled(gpu)
        async with infinistore.open_store() as store:
            with await store.register(tensor) as registration:
                assert not registration.registered
                with pytest.raises(ValueError, match=r"cuda:0, and this store has no RDMA.*tensor\.cpu"):
                    await store.put("a", tensor)
        async with infinistore.open_store(server.url) as store:
            with pytest.raises(DeviceMemoryUnreachable, match="not registered"):
                await store.get_into("a", tensor)
            with await store.register(tensor):
                with pytest.raises(DeviceMemoryUnreachable, match=r"reached by tcp \(the URL asks for TCP\)"):
                    await store.put("a", tensor)
                assert not await store.exists("a")
        assert gpu.library.calls == []


async def test_a_tensor_that_is_not_registered_is_refused_before_anything_is_sent() -> None:
    async with with_gpu() as (fabric, server, gpu), infinistore.open_store(rdma_url(server)) as store:
        tensor, other = filled(gpu), filled(gpu)
        await store.register(tensor)
        gpu.told.append(lambda: pytest.fail("nobody waits for it"))
        for blocks in ({"a": other}, {"a": tensor, "b": other}):
            with pytest.raises(DeviceMemoryUnreachable, match="register it with the store first"):
                await store.put_many(blocks)
        assert fabric.moved_bytes == 0


async def test_tensors_that_cannot_be_moved_as_they_are_are_refused() -> None:
    async with with_gpu() as (_, server, gpu), infinistore.open_store(rdma_url(server)) as store:
        tensor = filled(gpu)
        with pytest.raises(ValueError, match="not contiguous"):
            await store.register(tensor.view(2, -1).T)
        with pytest.raises(ValueError, match="at least one byte"):
            await store.register(tensor[:0])
        with FakeTensorMode(), pytest.raises(ValueError, match="no memory of its own"):
            await store.register(torch.empty(4, device="cuda"))
        with pytest.raises(ValueError, match="resolve_conj"):
            await store.register(gpu.tensor(4, dtype=torch.complex64).conj())
        await store.register(tensor)
        for mixed in ({"a": tensor, "b": b"host"}, {"a": b"host", "b": tensor}):
            with pytest.raises(ValueError, match="a bytes beside CUDA tensors; make two calls"):
                await store.put_many(mixed)
        with pytest.raises(TypeError):
            await store.put_many({"a": 5, "b": tensor})


# Failure


async def test_a_transfer_that_fails_stores_nothing_and_says_so() -> None:
    async with with_gpu() as (fabric, server, gpu), infinistore.open_store(best_url(server)) as store:
        tensor = filled(gpu)
        await store.register(tensor)
        await store.put("a", b"old")
        for call in (store.put, store.get_into):
            fabric.statuses.append(REMOTE_ACCESS)
            with pytest.raises(DeviceMemoryUnreachable, match="remote access error"):
                await call("a", tensor)
            with pytest.raises(DeviceMemoryUnreachable, match=r"reached by tcp .*tried again in"):
                await call("a", tensor)
            assert await store.get("a") == b"old"
            store.calls.rdma_pause.end()  # type: ignore[attr-defined]
            store.calls.pool.close_idle()  # type: ignore[attr-defined]


async def test_where_rdma_is_forced_a_failed_transfer_is_the_same_error_as_with_other_memory() -> None:
    async with with_gpu() as (fabric, server, gpu), infinistore.open_store(rdma_url(server)) as store:
        tensor = filled(gpu)
        await store.register(tensor)
        fabric.statuses.append(REMOTE_ACCESS)
        with pytest.raises(TransferFailed, match="remote access error"):
            await store.put("a", tensor)
        assert not await store.exists("a")
        await store.put("a", tensor)
        fabric.statuses.append(REMOTE_ACCESS)
        assert await store.get_into("a", tensor) == SIZE, "a get is tried again"


async def test_memory_that_is_unregistered_under_a_transfer_is_not_touched_any_more() -> None:
    async with with_gpu() as (fabric, server, gpu), infinistore.open_store(best_url(server)) as store:
        await store.put("a", VALUE)
        target = gpu.tensor(SIZE)
        registration = await store.register(target)
        fabric.held = True

        async def fails() -> None:
            with pytest.raises(DeviceMemoryUnreachable):
                await store.get_into("a", target)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails)
            await until_work_is_held(fabric)
            registration.close()
            fabric.release()
        assert gpu.read(target) == bytes(SIZE)
        assert registration.device_memory is None
        with pytest.raises(DeviceMemoryUnreachable, match="not registered"):
            await store.get_into("a", target)


async def test_nothing_is_written_to_a_gpu_after_a_cancelled_get() -> None:
    async with with_gpu() as (fabric, server, gpu), infinistore.open_store(rdma_url(server)) as store:
        await store.put("a", VALUE)
        target = gpu.tensor(SIZE)
        await store.register(target)
        await cancel_on_the_way(fabric, store.get_into, "a", target)
        fabric.release()
        assert gpu.read(target) == bytes(SIZE)


async def test_other_drivers_use_it_too() -> None:
    async with with_gpu() as (_, server, gpu):
        tensor = filled(gpu)

        def with_threads() -> None:
            with blocking.open_store(rdma_url(server)) as store, store.register(tensor):
                store.put("a", tensor)
                gpu.write(tensor, bytes(SIZE))
                assert store.get_into("a", tensor) == SIZE
                assert gpu.read(tensor) == VALUE

        async def with_asyncio() -> None:
            async with aio.open_store(rdma_url(server)) as store:
                with await store.register(tensor):
                    await store.put("b", tensor)
                    gpu.write(tensor, bytes(SIZE))
                    assert await store.get_into("b", tensor) == SIZE
                    assert gpu.read(tensor) == VALUE

        await trio.to_thread.run_sync(with_threads)
        await trio.to_thread.run_sync(asyncio.run, with_asyncio())
