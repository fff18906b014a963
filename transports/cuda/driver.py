"""CUDA's driver, as far as RDMA needs it: memory of a GPU as a dmabuf, and the order of
what the GPU and a card do.

Called by ctypes, because PyTorch has no such calls, and whoever has a CUDA tensor has
the library. The numbers are those of `cuda.h`. Sources: the CUDA Driver API
(cuMemGetHandleForAddressRange, cuFlushGPUDirectRDMAWrites, cuPointerSetAttribute) and
"GPUDirect RDMA", chapter "Synchronization and Memory Ordering".

Never run on a GPU: the tests show it a library that is made of Python.
"""

import ctypes
import mmap
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from infinistore.transports.cuda.memory import Cuda, DeviceMemory, Dmabuf
from infinistore.transports.rdma.verbs import NoRdma

if TYPE_CHECKING:
    import torch

__all__ = ["CudaDriver", "load_cuda", "record_event", "wait_for_event"]

LIBRARY = "libcuda.so.1"
_SUCCESS = 0
_DMA_BUF_SUPPORTED = 124
_FLUSH_WRITES_OPTIONS = 117
_WRITES_ORDERING = 118
_FLUSH_BY_HOST = 1  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
_OWNER = 100  # as an ordering: the GPU sees by itself what was written; as a scope: let the GPU see it
_CURRENT_CONTEXT = 0
_DMA_BUF_FD = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
_SYNC_MEMOPS = 6
_MEMORY_TYPE, _DEVICE_MEMORY = 2, 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_MEMORYTYPE_DEVICE
_DEVICE_ORDINAL = 9
_PCI_ADDRESS_BYTES = 32


class CudaDriver:
    """CUDA. `library` is the driver's, or None where it cannot be loaded; pages are of
    `page_bytes`.
    """

    def __init__(self, library: Any, page_bytes: int = mmap.PAGESIZE) -> None:
        self._library = library
        self._page_bytes = page_bytes

    def ordinal_at(self, address: int) -> int | None:
        """Return the number of the GPU whose memory is at an address."""
        if self._library is None or self._library.cuInit(ctypes.c_uint(0)) != _SUCCESS:
            return None
        kind, ordinal = ctypes.c_uint(), ctypes.c_int()
        for found, attribute in ((kind, _MEMORY_TYPE), (ordinal, _DEVICE_ORDINAL)):
            status = self._library.cuPointerGetAttribute(
                ctypes.byref(found), ctypes.c_int(attribute), ctypes.c_uint64(address)
            )
            if status != _SUCCESS:
                return None
        return ordinal.value if kind.value == _DEVICE_MEMORY else None

    def pci_address(self, ordinal: int) -> str | None:
        """Return where a GPU is on the PCI bus, in the kernel's spelling."""
        library, gpu, name = self._library, ctypes.c_int(), ctypes.create_string_buffer(_PCI_ADDRESS_BYTES)
        if library is None or library.cuInit(ctypes.c_uint(0)) != _SUCCESS:
            return None
        if library.cuDeviceGet(ctypes.byref(gpu), ctypes.c_int(ordinal)) != _SUCCESS:
            return None
        if library.cuDeviceGetPCIBusId(name, ctypes.c_int(_PCI_ADDRESS_BYTES), gpu) != _SUCCESS:
            return None
        return name.value.decode("ascii", "replace").lower()

    def export(self, memory: DeviceMemory) -> Dmabuf:
        """Return the memory as a dmabuf: the pages that it lies in; where those are
        refused, its whole allocation.
        """
        if not hasattr(self._library, "cuMemGetHandleForAddressRange"):
            why = f"has no {LIBRARY}" if self._library is None else "has a driver older than CUDA 11.7"
            raise NoRdma(f"this machine {why}")
        with self._context(memory.ordinal) as gpu:
            if not self._attribute(gpu, _DMA_BUF_SUPPORTED):
                raise NoRdma(f"the driver does not export memory of {memory.place}")
            status = _SUCCESS
            for start, length in self._ranges(memory):
                fd = ctypes.c_int(-1)
                status = self._library.cuMemGetHandleForAddressRange(
                    ctypes.byref(fd),
                    ctypes.c_uint64(start),
                    ctypes.c_size_t(length),
                    ctypes.c_int(_DMA_BUF_FD),
                    ctypes.c_ulonglong(0),
                )
                if status == _SUCCESS:
                    return Dmabuf(fd.value, memory.address - start)
            raise NoRdma(f"cuMemGetHandleForAddressRange: {self._name(status)}")

    def _ranges(self, memory: DeviceMemory) -> Iterator[tuple[int, int]]:
        """Where to begin, and how much: first the least, since a card maps all of what
        is exported.

        PyTorch cuts tensors out of larger allocations, so the second is not the same.
        Of memory that is mapped piece by piece (PyTorch's expandable segments) CUDA
        knows the first piece only; then there is no second.
        """
        yield self._pages(memory.address, memory.address + memory.length)
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        status = self._library.cuMemGetAddressRange_v2(
            ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(memory.address)
        )
        if status == _SUCCESS and memory.address + memory.length <= base.value + size.value:
            yield self._pages(base.value, base.value + size.value)

    def _pages(self, start: int, end: int) -> tuple[int, int]:
        page = self._page_bytes
        first = start // page * page
        return first, -(-end // page) * page - first

    def order_copies(self, memory: DeviceMemory) -> None:
        """Set CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, for the whole allocation. Some kinds of
        memory do not have it.
        """
        if self._library is not None:
            with suppress(NoRdma), self._context(memory.ordinal):
                self._library.cuPointerSetAttribute(
                    ctypes.byref(ctypes.c_uint(1)), ctypes.c_int(_SYNC_MEMOPS), ctypes.c_uint64(memory.address)
                )

    def record(self, ordinal: int) -> Any:
        """Return an event on PyTorch's current stream. Without PyTorch, all that the
        GPU does is to be waited for.
        """
        return record_event(ordinal) if "torch" in sys.modules else ordinal

    def is_done(self, event: Any) -> bool:
        """Whether the event has come."""
        return not isinstance(event, int) and bool(event.query())

    def wait(self, event: Any) -> None:
        """Wait for the event."""
        if not isinstance(event, int):
            wait_for_event(event)
        elif self._library is not None:
            with self._context(event):
                self._check("cuCtxSynchronize", self._library.cuCtxSynchronize())

    def flush(self, ordinal: int) -> None:
        """Call cuFlushGPUDirectRDMAWrites, if the GPU needs it and the driver can do
        it.

        Work that is given to a GPU after the bytes have arrived sees them in any case.
        This is for what runs already.
        """
        if self._library is None:
            return
        with suppress(NoRdma), self._context(ordinal) as gpu:
            needed = self._attribute(gpu, _WRITES_ORDERING) < _OWNER
            if needed and self._attribute(gpu, _FLUSH_WRITES_OPTIONS) & _FLUSH_BY_HOST:
                self._library.cuFlushGPUDirectRDMAWrites(ctypes.c_int(_CURRENT_CONTEXT), ctypes.c_int(_OWNER))

    @contextmanager
    def _context(self, ordinal: int) -> Generator[ctypes.c_int, None, None]:
        """Give the GPU, in its primary context, which is PyTorch's; a thread that is
        new to CUDA has none.
        """
        library = self._library
        gpu, context, left = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self._check("cuInit", library.cuInit(ctypes.c_uint(0)))
        self._check("cuDeviceGet", library.cuDeviceGet(ctypes.byref(gpu), ctypes.c_int(ordinal)))
        self._check("cuDevicePrimaryCtxRetain", library.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu))
        try:
            self._check("cuCtxPushCurrent", library.cuCtxPushCurrent_v2(context))
            try:
                yield gpu
            finally:
                library.cuCtxPopCurrent_v2(ctypes.byref(left))
        finally:
            library.cuDevicePrimaryCtxRelease_v2(gpu)

    def _attribute(self, gpu: ctypes.c_int, attribute: int) -> int:
        """Return an attribute of a GPU; 0 if this driver is too old to know it."""
        found = ctypes.c_int()
        status = self._library.cuDeviceGetAttribute(ctypes.byref(found), ctypes.c_int(attribute), gpu)
        return found.value if status == _SUCCESS else 0

    def _check(self, what: str, status: int) -> None:
        if status != _SUCCESS:
            raise NoRdma(f"{what}: {self._name(status)}")

    def _name(self, status: int) -> str:
        name = ctypes.c_char_p()
        self._library.cuGetErrorName(ctypes.c_int(status), ctypes.byref(name))
        return name.value.decode() if name.value else f"error {status}"


def record_event(device: "torch.device | int") -> "torch.cuda.Event":
    """Return an event on this thread's current stream of the GPU, in PyTorch's words;
    who waits for it sleeps.
    """
    import torch

    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def wait_for_event(event: "torch.cuda.Event") -> None:
    """Wait for an event that was recorded, in any thread."""
    import torch

    with torch.cuda.device(event.device):  # or a thread that is new to CUDA would begin to use the first GPU, too
        event.synchronize()


def load_cuda(library: str = LIBRARY) -> Cuda:
    """Return CUDA, whether it is there or not."""
    try:
        return CudaDriver(ctypes.CDLL(library))
    except OSError:
        return CudaDriver(None)
