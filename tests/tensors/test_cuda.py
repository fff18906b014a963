"""CUDA itself, where there is a GPU. Everywhere else `test_devices` does the same over
a CUDA that is faked.
"""

import os

import pytest
import torch

from infinistore.blocking import BlockingStore
from infinistore.client.memory.buffers import device_memory
from infinistore.tensors import LayerLoader, LayerWriter, devices, read_blocks, write_blocks
from infinistore.tensors.cuda_runtime import cuda_bindings
from infinistore.transports.cuda import load_cuda
from infinistore.transports.rdma.choice import NoRdma

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

BLOCK = 32_768
SLOW_CYCLES = 200_000_000  # the GPU is busy for a tenth of a second


@pytest.fixture(params=["bindings", "no bindings"], autouse=True)
def bindings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With cuda-bindings, if they are installed, and without."""
    if request.param == "no bindings":
        monkeypatch.setattr(devices, "cuda_bindings", lambda: None)
    elif cuda_bindings() is None:
        pytest.skip("cuda-bindings is not installed")


def made(rows: int) -> torch.Tensor:
    return torch.randint(0, 256, (rows, BLOCK), dtype=torch.uint8, device="cuda")


def named(rows: range, name: str = "") -> list[tuple[str, int]]:
    return [(f"{name}block {row}", row * BLOCK) for row in rows]


def test_the_driver_exports_memory_for_rdma_or_says_why_not() -> None:
    """As far as that can be seen without an RDMA device."""
    tensor = made(64)[3:, 5:]
    memory = device_memory(tensor.contiguous())
    ordinal = tensor.device.index
    cuda = load_cuda()
    assert cuda.ordinal_at(memory.address) == cuda.ordinal_at(memory.address + len(memory) - 1) == ordinal
    assert cuda.ordinal_at(torch.zeros(8).data_ptr()) is None
    torch.cuda._sleep(SLOW_CYCLES)  # type: ignore[no-untyped-call]
    event = cuda.record(ordinal)
    assert not cuda.is_done(event)
    cuda.wait(event)
    assert cuda.is_done(event)
    cuda.order_copies(memory)
    cuda.flush(ordinal)
    try:
        fd, offset = cuda.export(memory)
    except NoRdma as error:
        pytest.skip(str(error))
    try:
        assert os.lseek(fd, 0, os.SEEK_END) >= offset + len(memory)
    finally:
        os.close(fd)


@pytest.mark.parametrize("rows", [range(64), range(0, 64, 2)], ids=["neighbours", "scattered"])
@pytest.mark.parametrize("permuted", [False, True])
def test_blocks_come_back(any_store: BlockingStore, rows: range, permuted: bool) -> None:
    tensor, back = made(64), torch.zeros(64, BLOCK, dtype=torch.uint8, device="cuda")
    if permuted:
        tensor, back = tensor.view(BLOCK, 64).T, back.view(BLOCK, 64).T
    for _ in range(3):  # before the pool is known, when it is registered, and afterwards
        write_blocks(any_store, named(rows), BLOCK, tensor)
        back.zero_()
        read_blocks(any_store, named(rows), BLOCK, back)
        assert torch.equal(back[list(rows)], tensor[list(rows)])
        assert int(back.any(dim=1).sum()) == len(rows)
    assert any_store.get("block 2") == bytes(tensor[2].cpu().numpy())


def test_a_layer_is_stored_as_it_will_be_computed(any_store: BlockingStore) -> None:
    layers = [torch.zeros(16, BLOCK, dtype=torch.uint8, device="cuda") for _ in range(4)]
    for _ in range(2):
        with LayerWriter(any_store) as writer:
            for number, layer in enumerate(layers, 1):
                layer.zero_()
                torch.cuda._sleep(SLOW_CYCLES)  # type: ignore[no-untyped-call]
                layer.fill_(number)
                writer.write(layer, named(range(0, 16, 2), f"L{number}/"), BLOCK)
        for number in range(1, 5):
            assert any_store.get(f"L{number}/block 4") == bytes([number] * BLOCK)


def test_a_tensor_is_loaded_after_its_last_use_and_before_its_next(any_store: BlockingStore) -> None:
    source = made(16)
    write_blocks(any_store, named(range(16)), BLOCK, source)
    target = torch.ones(16, BLOCK, dtype=torch.uint8, device="cuda")
    with LayerLoader(any_store) as loader:
        for _ in range(2):
            target.fill_(1)
            torch.cuda._sleep(SLOW_CYCLES)  # type: ignore[no-untyped-call]
            before = target.sum(dtype=torch.int64)
            loader.load("layer", target, named(range(16)), BLOCK)
            loader.wait("layer")
            after = target.clone()
            assert int(before) == 16 * BLOCK
            assert torch.equal(after, source)
