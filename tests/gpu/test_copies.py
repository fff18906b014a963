"""Blocks go from a GPU into a store and back, by each path: one call for many pieces,
the fallback for older drivers, pinned staging memory, and a pool that is registered
with CUDA.
"""

import os
from collections.abc import Callable

import pytest
import torch

from infinistore.blocking import BlockingStore
from infinistore.client.memory.buffers import device_memory
from infinistore.tensors import read_blocks, write_blocks
from infinistore.transports.cuda import load_cuda
from infinistore.transports.rdma.choice import NoRdma
from tests.bad_days.servers import ServerHere
from tests.gpu.conftest import Calls
from tests.gpu.device import DEVICE, REHEARSAL, busy
from tests.tables import for_each
from tests.tensors.conftest import open_kind
from tests.tensors.contents import DTYPES, as_bytes

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

BLOCK = 32_768
FEW = 4
"""So many copies of one piece each the fallback makes at most."""


def made(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)


def named(rows: range, name: str = "") -> list[tuple[str, int]]:
    return [(f"{name}block {row}", row * BLOCK) for row in rows]


@pytest.mark.parametrize("rows", [range(64), range(0, 64, 2)], ids=["neighbours", "scattered"])
@pytest.mark.parametrize("permuted", [False, True])
def test_blocks_come_back(any_store: BlockingStore, calls: Calls, rows: range, permuted: bool) -> None:
    tensor, back = made(64, BLOCK), torch.zeros(64, BLOCK, dtype=torch.uint8, device=DEVICE)
    if permuted:
        tensor, back = tensor.view(BLOCK, 64).T, back.view(BLOCK, 64).T
    for _ in range(3):  # before the pool is known, when it is registered, and afterwards
        write_blocks(any_store, named(rows), BLOCK, tensor)
        back.zero_()
        read_blocks(any_store, named(rows), BLOCK, back)
        assert torch.equal(back[list(rows)], tensor[list(rows)])
        assert int(back.any(dim=1).sum()) == len(rows)
    assert any_store.get("block 2") == bytes(tensor[2].cpu().numpy())
    if not calls.batches:
        assert max(calls.pieces) <= FEW


@pytest.mark.parametrize(("kind", "mapped"), [("embedded", True), ("shm", True), ("tcp", False)])
def test_a_mapped_pool_is_registered_once_and_reached_without_staging(
    server: ServerHere, calls: Calls, kind: str, mapped: bool
) -> None:
    tensor = made(64, BLOCK)
    with open_kind(kind, server) as store:
        for _ in range(2):
            write_blocks(store, named(range(64)), BLOCK, tensor)
            read_blocks(store, named(range(64)), BLOCK, tensor)
        assert calls.registered == ([True] if mapped else [])
        calls.pinned.clear()
        write_blocks(store, named(range(64)), BLOCK, tensor)
        read_blocks(store, named(range(64)), BLOCK, tensor)
        assert bool(calls.pinned) is not mapped


@pytest.mark.parametrize("block", [4096, 16_384])
def test_a_thousand_blocks_that_are_scattered_on_both_sides_come_back(
    store: BlockingStore, calls: Calls, block: int
) -> None:
    """Every other place of the pool is taken."""
    count = (8 << 20) // block // 2
    store.put_many({f"taken {number}": bytes(block) for number in range(2 * count)})
    store.delete([f"taken {number}" for number in range(0, 2 * count, 2)])
    tensor, back = made(2 * count, block), torch.zeros(2 * count, block, dtype=torch.uint8, device=DEVICE)
    blocks = [(f"block {number}", number * block) for number in range(0, 2 * count, 2)]
    for _ in range(2):
        write_blocks(store, blocks, block, tensor)
        back.zero_()
        read_blocks(store, blocks, block, back)
        assert torch.equal(back[::2], tensor[::2]) and not back[1::2].any()
    if calls.batches:
        assert max(calls.pieces) > FEW and not calls.pinned
    else:
        assert max(calls.pieces) <= FEW


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda whole: whole,
    "rows of a larger tensor": lambda whole: whole[2:6],
    "columns of a larger tensor": lambda whole: whole[:, 1:3],
    "every other row": lambda whole: whole[::2],
    "transposed": lambda whole: whole.transpose(0, 1),
}


@for_each(dtype=DTYPES, layout=LAYOUTS)
def test_tensors_of_every_dtype_and_layout(store: BlockingStore, calls: Calls, dtype: torch.dtype, layout: str) -> None:
    """fp8 and bf16 are among them."""
    cut = LAYOUTS[layout]
    source, target = made(8, 4, dtype.itemsize), torch.zeros(8, 4, dtype.itemsize, dtype=torch.uint8, device=DEVICE)
    tensor, back = (cut(memory.view(dtype)[..., 0]) for memory in (source, target))
    half = tensor.numel() // 2 * dtype.itemsize
    blocks = [("first", 0), ("second", half)]
    write_blocks(store, blocks, half, tensor)
    assert store.get("first") + store.get("second") == as_bytes(cut(source.cpu()))
    read_blocks(store, blocks, half, back)
    expected = torch.zeros_like(source)
    cut(expected).copy_(cut(source))
    assert torch.equal(target, expected)


def test_an_expanded_tensor_is_written(store: BlockingStore, calls: Calls) -> None:
    row = made(64)
    write_blocks(store, [("first", 0), ("second", 128)], 128, row.expand(4, 64))
    assert store.get("first") == store.get("second") == 2 * bytes(row.cpu().numpy())


@pytest.mark.skipif(REHEARSAL, reason="asks the driver itself")
def test_the_driver_exports_memory_for_rdma_or_says_why_not() -> None:
    """As far as that can be seen without an RDMA device."""
    tensor = made(64, BLOCK)[3:, 5:]
    memory = device_memory(tensor.contiguous())
    ordinal = tensor.device.index
    cuda = load_cuda()
    assert cuda.ordinal_at(memory.address) == cuda.ordinal_at(memory.address + len(memory) - 1) == ordinal
    assert cuda.ordinal_at(torch.zeros(8).data_ptr()) is None
    busy()
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
