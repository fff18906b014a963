"""Tensors on a device, from end to end: over a faked CUDA, with real stores of every
kind.
"""

import asyncio
import gc
from collections.abc import Iterator
from functools import partial

import pytest
import torch

import infinistore
from infinistore import aio, blocking
from infinistore.blocking import BlockingStore
from infinistore.errors import ChecksumMismatch, OutOfMemory
from infinistore.tensors import (
    BlockSizeMismatch,
    BlocksMissing,
    LayerLoader,
    LayerWriter,
    devices,
    read_blocks,
    write_blocks,
)
from infinistore.tensors.blocking_transfers import get_blocks
from infinistore.tensors.copies import CudaCopies, MappedArena
from infinistore.tensors.tensor_blocks import blocks_to_read
from tests.bad_days.servers import ServerHere
from tests.tensors.conftest import GatedStore, open_kind
from tests.tensors.contents import as_bytes, random_bytes
from tests.tensors.fake_cuda import FakeCuda

BLOCK = 32_768
NAMED = [(f"block {number}", number * 2 * BLOCK) for number in range(8)]  # every other one


@pytest.fixture(params=[True, False], ids=["batches", "no batches"])
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """Every tensor is on the faked device."""
    fake = FakeCuda(batches=request.param)
    copies = CudaCopies(fake)
    monkeypatch.setattr(devices, "copies_for", lambda store, tensor: copies)
    yield fake
    copies.close()
    assert fake.registered == {}


@pytest.fixture
def tensor() -> torch.Tensor:
    return random_bytes(16, BLOCK)


@pytest.mark.parametrize("permuted", [False, True])
def test_blocks_come_back(any_store: BlockingStore, cuda: FakeCuda, tensor: torch.Tensor, permuted: bool) -> None:
    made = tensor.view(BLOCK, 16).T if permuted else tensor
    for _ in range(2):  # once before the pool is known, once after
        write_blocks(any_store, NAMED, BLOCK, made)
    assert any_store.get("block 3") == as_bytes(made)[6 * BLOCK : 7 * BLOCK]
    back = torch.zeros(16, BLOCK, dtype=torch.uint8)
    target = back.view(BLOCK, 16).T if permuted else back
    read_blocks(any_store, NAMED, BLOCK, target)
    expected = made.clone()
    expected[1::2] = 0
    assert torch.equal(target, expected)


def test_the_pool_is_pinned_where_it_is_mapped(server: ServerHere, cuda: FakeCuda, tensor: torch.Tensor) -> None:
    for kind, pinned in (("embedded", 1), ("shm", 1), ("tcp", 0)):
        with open_kind(kind, server) as store:
            before = cuda.count("register")
            for _ in range(3):
                write_blocks(store, NAMED, BLOCK, tensor)
                read_blocks(store, NAMED, BLOCK, tensor)
            assert cuda.count("register") - before == pinned, kind


def test_copies_go_straight_to_the_pool_where_the_driver_takes_batches(
    store: BlockingStore, cuda: FakeCuda, tensor: torch.Tensor
) -> None:
    write_blocks(store, NAMED, BLOCK, tensor)
    read_blocks(store, NAMED, BLOCK, tensor)
    if cuda.batches:
        assert (cuda.count("copy"), cuda.count("pinned")) == (2, 0)
    assert cuda.count("copy") <= 4


def test_a_layer_is_stored_as_it_was_when_it_was_written(any_store: BlockingStore, cuda: FakeCuda) -> None:
    """The device is behind: it has been told to compute the layer, and will go on with
    the tensor afterwards.
    """
    layers = [torch.zeros(16, BLOCK, dtype=torch.uint8) for _ in range(4)]
    with LayerWriter(any_store) as writer:
        for number, layer in enumerate(layers):
            cuda.compute.told.append(partial(layer.fill_, number + 1))
            blocks = [(f"L{number}/{key}", offset) for key, offset in NAMED]
            ticket = writer.write(layer, blocks, BLOCK)
            ticket.wait()
            cuda.compute.told.append(partial(layer.fill_, 99))
    for number in range(4):
        assert any_store.get(f"L{number}/block 7") == bytes([number + 1] * BLOCK)


def test_writes_and_loads_use_the_same_memory_again(server: ServerHere, cuda: FakeCuda, tensor: torch.Tensor) -> None:
    with open_kind("tcp", server) as store:
        with LayerWriter(store) as writer:
            for number in range(5):
                writer.write(tensor, [(f"{number} {key}", offset) for key, offset in NAMED], BLOCK).wait()
        assert cuda.count("pinned") == 1
        targets = [torch.zeros_like(tensor) for _ in range(5)]
        with LayerLoader(store) as loader:
            for number, target in enumerate(targets):
                loader.load(number, target, [(f"{number} {key}", offset) for key, offset in NAMED], BLOCK)
                loader.wait(number)
        assert cuda.count("pinned") == 2
    for target in targets:
        assert torch.equal(target[::2], tensor[::2]) and not target[1::2].any()


def test_layers_are_loaded(any_store: BlockingStore, cuda: FakeCuda, tensor: torch.Tensor) -> None:
    write_blocks(any_store, NAMED, BLOCK, tensor)
    any_store.put("short", bytes(BLOCK - 1))
    any_store.put("long", bytes(BLOCK + 1))
    target = torch.zeros_like(tensor)
    with LayerLoader(any_store) as loader:
        for _ in range(2):
            loader.load("good", target, NAMED, BLOCK)
            loader.load("missing", torch.zeros_like(tensor), [NAMED[0], ("gone", BLOCK)], BLOCK)
            loader.load("short", torch.zeros_like(tensor), [("short", 0)], BLOCK)
            loader.load("long", torch.zeros_like(tensor), [("long", 0)], BLOCK)
            loader.wait("good")
            assert torch.equal(target[::2], tensor[::2])
            target.zero_()
            with pytest.raises(BlocksMissing) as caught:
                loader.wait("missing")
            assert caught.value.keys == ["gone"]
            for layer in ("short", "long"):
                with pytest.raises(BlockSizeMismatch, match=f"'{layer}'"):
                    loader.wait(layer)


def test_tensors_of_the_device_and_of_the_host_go_in_one_batch(
    any_store: BlockingStore, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_device, there, scattered = random_bytes(16, BLOCK), random_bytes(16, BLOCK), random_bytes(BLOCK, 16).T
    made = devices.copies_for
    layers = {"device": on_device, "host": there, "scattered": scattered}
    backs = {name: torch.zeros_like(layer) for name, layer in layers.items()}
    of_device = {id(on_device), id(backs["device"])}
    monkeypatch.setattr(devices, "copies_for", lambda s, tensor: made(s, tensor) if id(tensor) in of_device else None)
    blocks = {name: [(f"{name} {key}", offset) for key, offset in NAMED] for name in layers}
    for _ in range(2):  # once before the pool is known, once after
        with LayerWriter(any_store, linger_s=60.0) as writer:
            for name, layer in layers.items():
                writer.write(layer, blocks[name], BLOCK)
            writer.flush()
            assert writer.statistics().puts == 1
    put = [(blocks[name], backs[name]) for name in layers]
    transfers = [devices.make_transfer(any_store, blocks_to_read(back, named, BLOCK)) for named, back in put]
    assert get_blocks(any_store, transfers, devices.Staging(None)) == [None] * 3
    for name, layer in layers.items():
        assert torch.equal(backs[name][::2], layer[::2]) and not backs[name][1::2].any(), name
    any_store.delete(["host block 3"])
    assert [one is None for one in get_blocks(any_store, transfers, devices.Staging(None))] == [True, False, True]


def test_a_block_that_rotted_in_the_pool_is_an_error(cuda: FakeCuda, tensor: torch.Tensor) -> None:
    with blocking.open_store(pool_bytes=4 << 20) as store:
        write_blocks(store, NAMED, BLOCK, tensor)
        with store.lease(["block 3"]) as (view,):
            assert view is not None
            ((reading, writing),) = store.mapped_arenas()
            assert writing is not None
            writing[bytes(reading).index(bytes(view))] ^= 1
            del view
        del reading, writing
        gc.collect()
        with pytest.raises(ChecksumMismatch):
            read_blocks(store, NAMED, BLOCK, tensor)


def test_what_is_refused_leaves_nothing_reserved(cuda: FakeCuda) -> None:
    with blocking.open_store(pool_bytes=1 << 19) as store:
        with pytest.raises(OutOfMemory):
            write_blocks(store, [(key, 2 * at) for key, at in NAMED], BLOCK * 4, random_bytes(32, BLOCK))
        cuda.copy_error = RuntimeError("the device fell off")
        with pytest.raises(RuntimeError, match="fell off"):
            write_blocks(store, NAMED, BLOCK, random_bytes(16, BLOCK))
        assert store.stats().store.reserved_bytes == 0
        assert store.keys() == []


def test_a_ticket_with_an_error_keeps_no_room_of_the_pool(cuda: FakeCuda, tensor: torch.Tensor) -> None:
    with blocking.open_store(pool_bytes=4 << 20) as store, LayerWriter(store) as writer:
        cuda.copy_error = RuntimeError("the device fell off")
        ticket = writer.write(tensor, NAMED, BLOCK)
        with pytest.raises(RuntimeError, match="fell off"):
            ticket.wait()
        assert ticket.failure is not None and repr(ticket.failure.again()) == repr(cuda.copy_error)
        assert store.stats().store.reserved_bytes == 0


@pytest.mark.parametrize(("scheme", "pinned"), [("shm", 1), ("tcp", 0)])
async def test_asynchronous_stores_use_the_pool_where_it_is_mapped(
    server: ServerHere, cuda: FakeCuda, tensor: torch.Tensor, scheme: str, pinned: int
) -> None:
    async with infinistore.open_store(server.url.replace("tcp", scheme)) as store:
        await write_blocks(store, NAMED, BLOCK, tensor)  # the pool is mapped by the first call that needs it
        before = cuda.count("pinned")
        await write_blocks(store, NAMED, BLOCK, tensor)
        back = torch.zeros_like(tensor)
        await read_blocks(store, NAMED, BLOCK, back)
        assert torch.equal(back[::2], tensor[::2])
        assert (await store.stats()).store.reserved_bytes == 0
    assert cuda.count("register") == pinned
    if cuda.batches:
        assert (cuda.count("pinned") == before) == bool(pinned)


def test_with_asyncio(cuda: FakeCuda, tensor: torch.Tensor) -> None:
    async def main() -> None:
        async with aio.open_store(pool_bytes=4 << 20) as store:
            await write_blocks(store, NAMED, BLOCK, tensor)
            back = torch.zeros_like(tensor)
            await read_blocks(store, NAMED, BLOCK, back)
            assert torch.equal(back[::2], tensor[::2])

    asyncio.run(main())


@pytest.mark.process  # cuda-bindings, if they are installed, ask a program where libraries are
def test_each_store_has_one_engine_which_ends_with_it(store: BlockingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(batches=True)
    monkeypatch.setattr(devices, "TorchCuda", lambda bindings: fake)
    tensor = torch.zeros(4, device="meta")  # not on the CPU; nothing is copied
    mine, other = GatedStore(store), GatedStore(store)
    copies = devices.copies_for(mine, tensor)
    assert devices.copies_for(mine, tensor) is copies
    assert devices.copies_for(other, tensor) is not copies
    assert isinstance(copies, CudaCopies)
    copies.use_pool([MappedArena(*arena) for arena in store.mapped_arenas()], tensor.device)
    assert len(fake.registered) == 1
    del mine
    gc.collect()
    assert fake.registered == {}
