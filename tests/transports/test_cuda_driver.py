"""What is said to CUDA's driver, to a library made of Python; with cuda-bindings
installed, the numbers are theirs.
"""

import mmap
import os
import sys

import pytest

from infinistore.transports import cuda as cuda_driver
from infinistore.transports.cuda import CudaDriver, DeviceMemory, load_cuda
from infinistore.transports.rdma.verbs import NoRdma
from tests.transports.fake_gpu import DMA_BUF_SUPPORTED, FLUSH_OPTIONS, WRITES_ORDERING, FakeLibrary

PAGE = mmap.PAGESIZE
BASE = 1600 * PAGE
MEMORY = DeviceMemory(BASE + PAGE + 700, 2 * PAGE, 0, None)


@pytest.fixture
def library() -> FakeLibrary:
    made = FakeLibrary()
    made.allocations.append((BASE, 64 * PAGE))
    return made


def test_the_pages_that_memory_lies_in_are_exported_and_no_more(library: FakeLibrary) -> None:
    fd, offset = CudaDriver(library).export(MEMORY)
    os.close(fd)
    assert offset == 700
    assert library.calls == [("export", BASE + PAGE, 3 * PAGE)]
    assert (library.contexts, library.current) == (0, 0)


def test_pages_are_those_of_the_host(library: FakeLibrary) -> None:
    page = 16 * PAGE  # as large as ARM's are
    fd, offset = CudaDriver(library, page_bytes=page).export(MEMORY)
    os.close(fd)
    start = MEMORY.address // page * page
    assert offset == MEMORY.address - start
    assert library.calls == [("export", start, page)]


def test_a_driver_that_wants_the_whole_allocation_gets_it(library: FakeLibrary) -> None:
    library.whole_allocations_only = True
    fd, offset = CudaDriver(library).export(MEMORY)
    os.close(fd)
    assert offset == MEMORY.address - BASE
    assert library.calls[-1] == ("export", BASE, 64 * PAGE)


def test_an_allocation_that_ends_before_the_memory_does_is_not_taken_for_it(library: FakeLibrary) -> None:
    """Of memory that is mapped piece by piece, CUDA names the first piece."""
    library.allocations[:] = [(BASE, 2 * PAGE), (BASE + 2 * PAGE, 62 * PAGE)]
    with pytest.raises(NoRdma, match="cuMemGetHandleForAddressRange: CUDA_ERROR_INVALID_VALUE"):
        CudaDriver(library).export(MEMORY)
    assert library.calls == [("export", BASE + PAGE, 3 * PAGE)]
    assert (library.contexts, library.current) == (0, 0)


def test_where_dmabufs_are_not_supported_the_reason_is_told(library: FakeLibrary) -> None:
    with pytest.raises(NoRdma, match=r"no libcuda\.so\.1"):
        CudaDriver(None).export(MEMORY)
    with pytest.raises(NoRdma, match=r"older than CUDA 11\.7"):
        CudaDriver(object()).export(MEMORY)
    library.attributes[DMA_BUF_SUPPORTED] = 0
    with pytest.raises(NoRdma, match="does not export memory of cuda:0"):
        CudaDriver(library).export(MEMORY)
    with pytest.raises(NoRdma, match="cuDeviceGet: CUDA_ERROR_INVALID_VALUE"):
        CudaDriver(library).export(DeviceMemory(BASE, PAGE, 3, None))
    assert library.calls == []


@pytest.mark.parametrize(
    ("ordering", "options", "flushes"), [(0, 1, True), (0, 3, True), (0, 2, False), (100, 1, False), (200, 1, False)]
)
def test_a_gpu_is_told_to_see_what_was_written_only_if_it_must_be_and_can_be(
    library: FakeLibrary, ordering: int, options: int, flushes: bool
) -> None:
    library.attributes.update({WRITES_ORDERING: ordering, FLUSH_OPTIONS: options})
    CudaDriver(library).flush(0)
    assert library.calls == [("flush",)] * flushes


def test_what_only_helps_fails_silently() -> None:
    for driver in (CudaDriver(None), CudaDriver(FakeLibrary())):
        driver.flush(7)
        driver.order_copies(DeviceMemory(BASE, PAGE, 7, None))


def test_an_address_is_known_as_a_gpus(library: FakeLibrary) -> None:
    driver = CudaDriver(library)
    assert [driver.ordinal_at(address) for address in (BASE - 1, BASE, BASE + 64 * PAGE)] == [None, 0, None]
    assert CudaDriver(None).ordinal_at(BASE) is None


def test_without_pytorch_all_that_a_gpu_does_is_waited_for(
    library: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    driver = CudaDriver(library)
    event = driver.record(0)
    assert library.calls == []
    driver.wait(event)
    assert library.calls == [("synchronize",)]
    CudaDriver(None).wait(event)


def test_a_machine_without_cuda_has_a_driver_that_can_nothing() -> None:
    with pytest.raises(NoRdma):
        load_cuda("libcuda.so.absent").export(MEMORY)


def test_the_numbers_are_those_of_cuda() -> None:
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    attribute = driver.CUdevice_attribute
    numbers = {
        "_DMA_BUF_SUPPORTED": attribute.CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED,
        "_FLUSH_WRITES_OPTIONS": attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS,
        "_WRITES_ORDERING": attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING,
        "_FLUSH_BY_HOST": driver.CUflushGPUDirectRDMAWritesOptions.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST,
        "_OWNER": driver.CUflushGPUDirectRDMAWritesScope.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER,
        "_CURRENT_CONTEXT": (
            driver.CUflushGPUDirectRDMAWritesTarget.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX
        ),
        "_DMA_BUF_FD": driver.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD,
        "_MEMORY_TYPE": driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        "_DEVICE_MEMORY": driver.CUmemorytype.CU_MEMORYTYPE_DEVICE,
        "_DEVICE_ORDINAL": driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        "_SYNC_MEMOPS": driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS,
    }
    assert {name: getattr(cuda_driver, name) for name in numbers} == {
        name: int(value) for name, value in numbers.items()
    }
