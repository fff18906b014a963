"""A GPU and its driver's library, made of this process's memory.

Tensors "on" it say that they are on `cuda:0` and refuse to show their bytes; their
addresses are good for whoever moves bytes by address, as RDMA does. The library demands
what CUDA does: a context, whole pages, memory that is one allocation's. What streams
were told is done when somebody waits.
"""

# ruff: noqa: N802 - the names are those of CUDA
import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import torch

from infinistore.transports import cuda as cuda_driver
from infinistore.transports.cuda import CudaDriver
from infinistore.transports.rdma.memory import address_of
from tests.transports.fake_rdma import Fabric

__all__ = ["CudaTensor", "FakeGpu", "FakeLibrary", "gpu_in_use"]

SUCCESS, INVALID_VALUE, INVALID_CONTEXT, NOT_SUPPORTED = 0, 1, 201, 801
_NAMES = {INVALID_VALUE: b"CUDA_ERROR_INVALID_VALUE", INVALID_CONTEXT: b"CUDA_ERROR_INVALID_CONTEXT"}
DMA_BUF_SUPPORTED, FLUSH_OPTIONS, WRITES_ORDERING = 124, 117, 118
CONTEXT = 0x77


class FakeLibrary:
    """libcuda. `allocations` are address and length; `exported` is called with the
    range that a new dmabuf is of.
    """

    def __init__(self, exported: Callable[[int, int, int], None] = lambda fd, start, length: None) -> None:
        self.allocations: list[tuple[int, int]] = []
        self.attributes = {DMA_BUF_SUPPORTED: 1, FLUSH_OPTIONS: 1, WRITES_ORDERING: 0}
        self.whole_allocations_only = False
        self.calls: list[tuple[Any, ...]] = []
        self.contexts = self.current = 0
        self.pci_address = b"0000:1A:00.0"
        self.fds: list[int] = []
        self._exported = exported

    def cuInit(self, flags: Any) -> int:
        assert flags.value == 0
        return SUCCESS

    def cuGetErrorName(self, status: Any, name: Any) -> int:
        name._obj.value = _NAMES.get(status.value)
        return SUCCESS

    def cuDeviceGet(self, device: Any, ordinal: Any) -> int:
        device._obj.value = ordinal.value + 40
        return SUCCESS if ordinal.value == 0 else INVALID_VALUE

    def cuDeviceGetPCIBusId(self, name: Any, length: Any, device: Any) -> int:
        name.value = self.pci_address[: length.value - 1]
        return SUCCESS if device.value == 40 and self.pci_address else INVALID_VALUE

    def cuDeviceGetAttribute(self, found: Any, attribute: Any, device: Any) -> int:
        assert device.value == 40
        found._obj.value = self.attributes.get(attribute.value, 0)
        return SUCCESS if attribute.value in self.attributes else INVALID_VALUE

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        assert device.value == 40
        self.contexts += 1
        context._obj.value = CONTEXT
        return SUCCESS

    def cuDevicePrimaryCtxRelease_v2(self, device: Any) -> int:
        assert device.value == 40
        self.contexts -= 1
        return SUCCESS

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        assert context.value == CONTEXT
        self.current += 1
        return SUCCESS

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        self.current -= 1
        return SUCCESS

    def cuCtxSynchronize(self) -> int:
        self.calls.append(("synchronize",))
        return SUCCESS if self.current else INVALID_CONTEXT

    def cuPointerGetAttribute(self, data: Any, attribute: Any, pointer: Any) -> int:
        data._obj.value = {2: 2, 9: 0}[attribute.value]  # of a device; the first
        inside = any(start <= pointer.value < start + length for start, length in self.allocations)
        return SUCCESS if inside else INVALID_VALUE

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, pointer: Any) -> int:
        for start, length in self.allocations:
            if start <= pointer.value < start + length:
                base._obj.value, size._obj.value = start, length
                return SUCCESS
        return INVALID_VALUE

    def cuMemGetHandleForAddressRange(self, handle: Any, pointer: Any, size: Any, kind: Any, flags: Any) -> int:
        assert (kind.value, flags.value) == (1, 0)
        start, length = pointer.value, size.value
        self.calls.append(("export", start, length))
        if not self.current:
            return INVALID_CONTEXT
        whole = (start, length) in self.allocations
        inside = any(first <= start and start + length <= first + size for first, size in self.allocations)
        if start % mmap.PAGESIZE or length % mmap.PAGESIZE or not (whole if self.whole_allocations_only else inside):
            return INVALID_VALUE
        fd = os.memfd_create("dmabuf")
        self.fds.append(os.fstat(fd).st_ino)
        self._exported(fd, start, length)
        handle._obj.value = fd
        return SUCCESS

    def cuPointerSetAttribute(self, value: Any, attribute: Any, pointer: Any) -> int:
        assert (value._obj.value, attribute.value) == (1, 6)
        assert self.current
        self.calls.append(("order copies", pointer.value))
        return SUCCESS

    def cuFlushGPUDirectRDMAWrites(self, target: Any, scope: Any) -> int:
        assert (target.value, scope.value) == (0, 100)
        assert self.current
        self.calls.append(("flush",))
        return SUCCESS


class FakeGpu(CudaDriver):
    """A GPU whose one allocation tensors are cut from, never at the beginning of a
    page.
    """

    def __init__(self, fabric: Fabric, size: int = 1 << 20) -> None:
        def exported(fd: int, start: int, length: int) -> None:
            fabric.dmabufs[os.fstat(fd).st_ino] = start, length

        self.library = FakeLibrary(exported)
        super().__init__(self.library)
        self._memory = mmap.mmap(-1, size)
        self._used = 512
        self.told: list[Callable[[], object]] = []
        """What the computing stream was told, and has not done."""
        self.library.allocations.append((address_of(memoryview(self._memory)), size))

    def tensor(self, *shape: int, dtype: torch.dtype = torch.uint8) -> "CudaTensor":
        """A tensor of zeros on the GPU."""
        count = torch.Size(shape).numel()
        made = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=self._used)
        self._used += -(-made.nbytes // 512) * 512
        return made.view(shape).as_subclass(CudaTensor)

    def write(self, tensor: torch.Tensor, content: bytes) -> None:
        """What a kernel would do."""
        assert len(content) == tensor.nbytes
        ctypes.memmove(tensor.data_ptr(), content, len(content))

    def read(self, tensor: torch.Tensor) -> bytes:
        """What a kernel would see."""
        return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)

    @property
    def open_dmabufs(self) -> int:
        """How many descriptors that the driver handed out are not closed."""
        open_inodes = {_inode(fd) for fd in os.listdir("/proc/self/fd")}
        return sum(inode in open_inodes for inode in self.library.fds)

    def record(self, ordinal: int) -> int:
        assert ordinal == 0
        return len(self.told)

    def is_done(self, event: int) -> bool:
        return not (event and self.told)

    def wait(self, event: int) -> None:
        while event and self.told:
            event -= 1
            self.told.pop(0)()


class CudaTensor(torch.Tensor):
    """A tensor that says it is on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)

    def untyped_storage(self) -> Any:
        storage = self.as_subclass(torch.Tensor).untyped_storage()
        return SimpleNamespace(device=self.device, data_ptr=storage.data_ptr, nbytes=storage.nbytes)

    def _out_of_reach(self, *_: object, **__: object) -> NoReturn:
        raise AssertionError("a processor touches the memory of a GPU")

    numpy = cpu = tolist = item = __array__ = _out_of_reach


@contextmanager
def gpu_in_use(fabric: Fabric) -> Iterator[FakeGpu]:
    """A GPU that stores of this process find; at the end, no dmabuf and no context may
    be left.
    """
    gpu = FakeGpu(fabric)
    with mock.patch.object(cuda_driver, "load_cuda", return_value=gpu):
        yield gpu
    assert gpu.open_dmabufs == 0
    assert (gpu.library.contexts, gpu.library.current) == (0, 0)


def _inode(fd: str) -> int:
    try:
        return os.fstat(int(fd)).st_ino
    except OSError:  # the one that listed the folder
        return 0
