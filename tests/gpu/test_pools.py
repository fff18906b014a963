"""Large pools: how long it takes to register one with CUDA, blocks beyond 4 GiB, and
what happens if a pool cannot be registered.

GPU_POOL is the size of the largest, such as 64GiB; otherwise it is three quarters of
the available memory, at most 64 GiB.
"""

import gc
import os
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from infinistore.blocking import BlockingStore, open_store
from infinistore.host import available_memory
from infinistore.sizes import GIB, MIB, in_units, parse_size
from infinistore.tensors import read_blocks, write_blocks
from infinistore.tensors.cuda_runtime import TorchCuda
from tests.gpu.conftest import Calls
from tests.gpu.device import DEVICE, REHEARSAL
from tests.tensors.fake_cuda import FakeCuda

BLOCK = MIB
BATCH = (8 if REHEARSAL else 256) * MIB


def largest_pool() -> int:
    if REHEARSAL:
        return 64 * MIB
    given = os.environ.get("GPU_POOL")
    return parse_size(given) if given else min(64 * GIB, available_memory().available_bytes * 3 // 4 // GIB * GIB)


def named(batch: int) -> list[tuple[str, int]]:
    return [(f"{batch}/{offset}", offset) for offset in range(0, BATCH, BLOCK)]


@pytest.mark.timeout(600)
def test_a_large_pool_is_registered_and_reached_everywhere(
    calls: Calls, record_property: Callable[[str, object], None]
) -> None:
    """The first write registers the pool. Then it is filled to two thirds, or to 8
    GiB.
    """
    size = largest_pool()
    tensor = torch.randint(0, 256, (BATCH,), dtype=torch.uint8, device=DEVICE)
    with open_store(pool_bytes=size, minimal_allocate_bytes=64 * 1024, verify="never") as store:
        started = time.perf_counter()  # real time: it is told, and compared with nothing
        write_blocks(store, named(0), BLOCK, tensor)
        took_s = time.perf_counter() - started  # real time: the same
        record_property("registered", f"{in_units(size)} in {took_s:.2f} s")
        assert calls.registered == [True]
        last = min(size * 2 // 3, 8 * GIB) // BATCH
        for number in range(1, last + 1):
            tensor[:16].copy_(torch.frombuffer(bytearray(number.to_bytes(16, "little")), dtype=torch.uint8))
            write_blocks(store, named(number), BLOCK, tensor)
        back = torch.zeros_like(tensor)
        for number in (last, last // 2, 1):
            read_blocks(store, named(number), BLOCK, back)
            assert bytes(back[:16].cpu().numpy()) == number.to_bytes(16, "little")
            assert torch.equal(back[16:], tensor[16:])


def write_and_read(store: BlockingStore) -> None:
    tensor = torch.randint(0, 256, (8 * MIB,), dtype=torch.uint8, device=DEVICE)
    back = torch.zeros_like(tensor)
    blocks = [(f"{offset}", offset) for offset in range(0, 8 * MIB, 2 * 65_536)]
    for _ in range(2):
        write_blocks(store, blocks, 65_536, tensor)
        read_blocks(store, blocks, 65_536, back)
    assert torch.equal(back.view(-1, 2, 65_536)[:, 0], tensor.view(-1, 2, 65_536)[:, 0])


def test_a_pool_that_cannot_be_registered_is_used_all_the_same(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """As memory that is not pinned."""
    for runtime in (TorchCuda, FakeCuda):
        monkeypatch.setattr(runtime, "register", lambda self, device, address, length, *, read_only: False)
    with open_store(pool_bytes=64 * MIB, minimal_allocate_bytes=4096) as store:
        write_and_read(store)


@pytest.mark.skipif(REHEARSAL, reason="asks CUDA itself")
def test_a_pool_that_somebody_else_has_registered_leaves_no_error_behind(calls: Calls) -> None:
    """The error of registering it again does not stay: the next kernel runs."""
    with open_store(pool_bytes=64 * MIB, minimal_allocate_bytes=4096) as store:
        store.put("first", b"value")
        (reading, writing), *_ = store.mapped_arenas()
        address = np.frombuffer(writing or reading, np.uint8).ctypes.data
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        assert int(cudart.cudaHostRegister(address, len(writing or reading), 1)) == 0
        try:
            write_and_read(store)
            assert calls.registered == [False]
            assert int(torch.ones(1000, device=DEVICE).sum()) == 1000
            torch.cuda.synchronize()
        finally:
            assert int(cudart.cudaHostUnregister(address)) == 0


def test_a_pool_is_registered_again_by_the_next_store(calls: Calls) -> None:
    """As the last one is gone, its memory is no longer registered, and the next pool
    may be where it was.
    """
    for _ in range(4):
        with open_store(pool_bytes=64 * MIB, minimal_allocate_bytes=4096) as store:
            write_and_read(store)
        del store
        gc.collect()
    assert calls.registered == 4 * [True]
