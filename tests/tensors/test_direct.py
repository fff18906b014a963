"""Tensors on a GPU that is registered for RDMA: moved without the host where that goes,
and with it where not.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import attrs
import pytest
import torch
import trio

import infinistore
from infinistore import blocking
from infinistore.blocking import BlockingStore
from infinistore.errors import TransferFailed
from infinistore.tensors import (
    BlockSizeMismatch,
    BlocksMissing,
    LayerLoader,
    LayerWriter,
    devices,
    read_blocks,
    write_blocks,
)
from infinistore.tensors.copies import CudaCopies
from infinistore.tensors.tensor_blocks import TensorBlocks
from tests.clients.rdma_serving import best_url, rdma_url, serving
from tests.server.running import RunningServer
from tests.tensors.fake_cuda import FakeCuda
from tests.transports.fake_gpu import FakeGpu, gpu_in_use
from tests.transports.fake_rdma import Fabric

BLOCK = 4096
COUNT = 8
CONTENT = bytes(range(256)) * (COUNT * BLOCK // 256)
NAMED = [(f"block {number}", number * BLOCK) for number in range(0, COUNT, 2)]
HALF = len(NAMED) * BLOCK
REMOTE_ACCESS = 10


class Copies(CudaCopies):
    """What PyTorch does on the GPU it does here to the same memory, seen as the
    CPU's.
    """

    def to_host(self, blocks: TensorBlocks, targets: Sequence[memoryview], after: Any) -> None:
        super().to_host(_as_on_cpu(blocks), targets, after)

    def to_device(self, sources: Sequence[memoryview], blocks: TensorBlocks, after: Any) -> None:
        super().to_device(sources, _as_on_cpu(blocks), after)


def _as_on_cpu(blocks: TensorBlocks) -> TensorBlocks:
    return attrs.evolve(blocks, tensor=blocks.tensor.as_subclass(torch.Tensor))


@attrs.frozen
class Setting:
    """A server, and a client with a GPU. `copies` is CUDA as blocks are copied by it,
    by way of the host.
    """

    fabric: Fabric
    server: RunningServer
    gpu: FakeGpu
    copies: FakeCuda

    def filled(self) -> torch.Tensor:
        tensor = self.gpu.tensor(COUNT, BLOCK)
        self.gpu.write(tensor, CONTENT)
        return tensor


@asynccontextmanager
async def setting() -> AsyncGenerator[Setting, None]:
    async with serving() as (fabric, server):
        with gpu_in_use(fabric) as gpu, pytest.MonkeyPatch.context() as patch:
            cuda = FakeCuda(batches=True)
            copies = Copies(cuda)
            patch.setattr(devices, "copies_for", lambda store, tensor: copies)
            patch.setattr(torch.cuda, "is_available", lambda: True)
            yield Setting(fabric, server, gpu, cuda)
            copies.close()
        await server.quiet()


async def with_threads(url: str, work: Callable[[BlockingStore], None]) -> None:
    def run() -> None:
        with blocking.open_store(url) as store:
            work(store)

    await trio.to_thread.run_sync(run)


def expected(content: bytes = CONTENT) -> bytes:
    return b"".join(content[start : start + BLOCK] + bytes(BLOCK) for _, start in NAMED)


async def test_blocks_of_a_registered_tensor_are_not_copied() -> None:
    async with setting() as here:
        source, target = here.filled(), here.gpu.tensor(COUNT, BLOCK)

        def there_and_back(store: BlockingStore) -> None:
            with store.register(source), store.register(target):
                write_blocks(store, NAMED, BLOCK, source)
                read_blocks(store, NAMED, BLOCK, target)
            assert store.get("block 2") == CONTENT[2 * BLOCK : 3 * BLOCK]

        await with_threads(rdma_url(here.server), there_and_back)
        assert here.gpu.read(target) == expected()
        assert here.copies.count("copy") == 0


async def test_asynchronous_stores_do_the_same() -> None:
    async with setting() as here, infinistore.open_store(rdma_url(here.server)) as store:
        source, target = here.filled(), here.gpu.tensor(COUNT, BLOCK)
        with await store.register(source), await store.register(target):
            await write_blocks(store, NAMED, BLOCK, source)
            await read_blocks(store, NAMED, BLOCK, target)
        assert here.gpu.read(target) == expected()
        assert here.copies.count("copy") == 0


async def test_what_is_not_registered_or_lies_scattered_is_copied() -> None:
    async with setting() as here:
        source, target = here.filled(), here.gpu.tensor(COUNT, BLOCK)

        def there_and_back(store: BlockingStore) -> None:
            write_blocks(store, NAMED, BLOCK, source)
            with store.register(source), store.register(target):
                read_blocks(store, [(key, 2 * start) for key, start in NAMED[:1]], BLOCK, target.view(BLOCK, COUNT).T)

        await with_threads(rdma_url(here.server), there_and_back)
        assert here.copies.count("copy") > 1


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_where_rdma_fails_blocks_go_by_way_of_the_host(asynchronous: bool) -> None:
    async with setting() as here:
        source, target = here.filled(), here.gpu.tensor(COUNT, BLOCK)
        if asynchronous:
            async with infinistore.open_store(best_url(here.server)) as store:
                with await store.register(source), await store.register(target):
                    here.fabric.unplugged = True
                    await write_blocks(store, NAMED, BLOCK, source)
                    await read_blocks(store, NAMED, BLOCK, target)
        else:

            def there_and_back(store: BlockingStore) -> None:
                with store.register(source), store.register(target):
                    here.fabric.unplugged = True
                    write_blocks(store, NAMED, BLOCK, source)
                    read_blocks(store, NAMED, BLOCK, target)
                    assert store.stats().transport == "tcp"

            await with_threads(best_url(here.server), there_and_back)
        assert here.gpu.read(target) == expected()
        assert here.copies.count("copy") == 2


async def test_where_rdma_is_forced_a_failed_transfer_is_an_error() -> None:
    async with setting() as here, infinistore.open_store(rdma_url(here.server)) as store:
        source = here.filled()
        with await store.register(source):
            here.fabric.statuses.append(REMOTE_ACCESS)
            with pytest.raises(TransferFailed):
                await write_blocks(store, NAMED, BLOCK, source)
            assert not await store.exists("block 0")


async def test_what_is_wrong_with_blocks_is_told_as_ever() -> None:
    async with setting() as here, infinistore.open_store(rdma_url(here.server)) as store:
        tensor = here.filled()
        with await store.register(tensor):
            await store.put_many({"block 0": bytes(BLOCK - 1), "long": bytes(BLOCK + 1)})
            with pytest.raises(BlocksMissing) as caught:
                await read_blocks(store, NAMED, BLOCK, tensor)
            assert caught.value.keys == [key for key, _ in NAMED[1:]]
            for key in ("block 0", "long"):
                with pytest.raises(BlockSizeMismatch):
                    await read_blocks(store, [(key, 0)], BLOCK, tensor)


async def test_layers_are_stored_as_they_were_computed_and_loaded_after_their_last_use() -> None:
    async with setting() as here:
        layers = [here.gpu.tensor(COUNT, BLOCK) for _ in range(3)]

        def work(store: BlockingStore) -> None:
            registrations = [store.register(layer) for layer in layers]
            with LayerWriter(store) as writer:
                for number, layer in enumerate(layers):
                    here.copies.compute.told.append(partial(here.gpu.write, layer, bytes([number + 1] * COUNT * BLOCK)))
                    writer.write(layer, [(f"{number}/{key}", start) for key, start in NAMED], BLOCK)
            seen: list[bytes] = []
            with LayerLoader(store) as loader:
                for number, layer in enumerate(layers):
                    here.copies.compute.told.append(partial(here.gpu.write, layer, bytes(COUNT * BLOCK)))
                    loader.load(number, layer, [(f"{number}/{key}", start) for key, start in NAMED], BLOCK)
                    loader.wait(number)
                    seen.append(here.gpu.read(layer))
            assert seen == [expected(bytes([number + 1] * len(CONTENT))) for number in range(3)]
            for registration in registrations:
                registration.close()

        await with_threads(rdma_url(here.server), work)
        assert here.copies.count("copy") == 0
