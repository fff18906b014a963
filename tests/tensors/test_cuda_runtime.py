"""What is said to cuda-bindings and to PyTorch, as far as that can be seen without a
GPU.

With cuda-bindings installed, its real functions take the arguments and fail for want of
a driver.
"""

# ruff: noqa: N802, N815 - the names are those of CUDA
import enum
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infinistore.errors import InfiniStoreException
from infinistore.tensors import CudaError
from infinistore.tensors.copies import addresses_of
from infinistore.tensors.cuda_runtime import Pieces, TorchCuda, cuda_bindings
from tests.tensors.contents import random_bytes

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
GPU = torch.device("cuda", 1)
STREAM = SimpleNamespace(cuda_stream=0x1000)


class Status(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1


class Bindings:
    """The part of `cuda.bindings.runtime` that is used, as its documentation has it."""

    cudaError_t = Status
    cudaMemcpySrcAccessOrder = SimpleNamespace(cudaMemcpySrcAccessOrderStream="in stream order")
    cudaMemcpyFlags = SimpleNamespace(cudaMemcpyFlagPreferOverlapWithCompute=1)
    cudaMemcpyAttributes = SimpleNamespace

    def __init__(self, *, driver: int = 13000, runtime: int = 13000, status: Status = Status.cudaSuccess) -> None:
        self.driver, self.runtime, self.status = driver, runtime, status
        self.calls: list[tuple[Any, ...]] = []

    def cudaDriverGetVersion(self) -> tuple[Status, int]:
        return Status.cudaSuccess, self.driver

    def cudaRuntimeGetVersion(self) -> tuple[Status, int]:
        return Status.cudaSuccess, self.runtime

    def cudaGetErrorString(self, status: Status) -> tuple[Status, bytes]:
        return Status.cudaSuccess, status.name.encode()

    def cudaGetLastError(self) -> tuple[Status]:
        self.calls.append(("last error",))
        return (self.status,)

    def cudaMemcpyBatchAsync(self, *arguments: Any) -> tuple[Status, None]:
        self.calls.append(arguments)
        return self.status, None

    def cudaHostRegister(self, *arguments: Any) -> tuple[Status]:
        self.calls.append(arguments)
        return (self.status,)

    def cudaHostUnregister(self, *arguments: Any) -> tuple[Status]:
        self.calls.append(arguments)
        return (self.status,)


@pytest.fixture(autouse=True)
def no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchCuda, "on", lambda self, stream: nullcontext())
    monkeypatch.setattr(TorchCuda, "at", lambda self, device: nullcontext())


@pytest.mark.parametrize("to_host", [True, False])
def test_pieces_go_in_one_batch(to_host: bool) -> None:
    bindings = Bindings()
    memory = random_bytes(64)
    TorchCuda(bindings).copy(STREAM, memory, Pieces([0, 32], [4096, 8192], [16, 8]), to_host=to_host)
    ((targets, sources, sizes, count, (attributes,), first, kinds, stream),) = bindings.calls
    device = [memory.data_ptr(), memory.data_ptr() + 32]
    assert (targets, sources) == (([4096, 8192], device) if to_host else (device, [4096, 8192]))
    assert (sizes, count, first, kinds, stream) == ([16, 8], 2, [0], 1, 0x1000)
    assert vars(attributes) == {"srcAccessOrder": "in stream order", "flags": 1}


@pytest.mark.parametrize("bindings", [Bindings(), Bindings(driver=12070, runtime=12070), None], ids=["one", "old", ""])
@pytest.mark.parametrize("to_host", [True, False])
def test_one_piece_is_copied_by_pytorch(bindings: Bindings | None, to_host: bool) -> None:
    memory, other = random_bytes(64), bytearray(range(64))
    where = int(addresses_of([memoryview(other)])[0])
    TorchCuda(bindings).copy(STREAM, memory, Pieces([32], [where + 16], [16]), to_host=to_host)
    assert bytes(memory[32:48].numpy()) == bytes(other[16:32])
    assert not to_host or other[:16] + other[32:] == bytes([*range(16), *range(32, 64)])
    assert bindings is None or bindings.calls == []


@pytest.mark.parametrize(
    ("driver", "runtime", "batches"),
    [(13000, 13000, True), (13010, 13050, True), (12080, 12090, True), (12070, 12090, False), (12090, 13000, False)],
)
def test_batches_need_a_driver_that_is_new_enough(driver: int, runtime: int, batches: bool) -> None:
    assert TorchCuda(Bindings(driver=driver, runtime=runtime)).batches is batches


def test_a_batch_that_cuda_refuses_is_a_typed_error() -> None:
    bindings = Bindings(status=Status.cudaErrorInvalidValue)
    with pytest.raises(CudaError, match="cudaMemcpyBatchAsync: cudaErrorInvalidValue") as caught:
        TorchCuda(bindings).copy(STREAM, random_bytes(8), Pieces([0, 4], [0, 8], [2, 2]), to_host=True)
    assert isinstance(caught.value, InfiniStoreException)


@pytest.mark.parametrize(("read_only", "flags"), [(False, 1), (True, 9)])
def test_memory_is_pinned_for_every_device(read_only: bool, flags: int) -> None:
    bindings = Bindings()
    runtime = TorchCuda(bindings)
    assert runtime.register(GPU, 4096, 8192, read_only=read_only)
    runtime.unregister(GPU, 4096)
    assert bindings.calls == [(4096, 8192, flags), (4096,)]


def test_memory_that_cannot_be_pinned_leaves_no_error_behind() -> None:
    bindings = Bindings(status=Status.cudaErrorInvalidValue)
    assert not TorchCuda(bindings).register(GPU, 4096, 8192, read_only=False)
    assert bindings.calls[-1] == ("last error",)


@pytest.mark.process  # cuda-bindings ask a program where libraries are
@without_gpu
def test_the_real_bindings_take_these_arguments() -> None:
    bindings = pytest.importorskip("cuda.bindings.runtime", reason="cuda-bindings is not installed")
    assert cuda_bindings() is bindings
    runtime = TorchCuda(bindings)
    assert not runtime.batches
    runtime.batches = True
    with pytest.raises(CudaError, match=r"cudaMemcpyBatchAsync: .*driver"):
        runtime.copy(STREAM, random_bytes(8), Pieces([0, 4], [4096, 8192], [2, 2]), to_host=True)
    assert not runtime.register(GPU, 4096, 4096, read_only=True)
