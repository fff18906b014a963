"""Memory of a GPU, as far as RDMA needs it: by address and length, and how a card
reaches it. Never run on a GPU: the tests show it a library that is made of Python.

The memory views of the rest of the code are of this process's memory, and hashing or
copying one of a GPU's would crash. So memory of a GPU has a type of its own,
`DeviceMemory`. It is cut like a view, and nothing else can be done to it here.

`CudaDriver` is what RDMA asks of a GPU's driver; the tests ask memory of this process.
The driver is called by ctypes, because PyTorch has no such calls, and whoever has a
CUDA tensor has the library. The numbers are those of `cuda.h`. Sources: the CUDA
Driver API (cuMemGetHandleForAddressRange, cuFlushGPUDirectRDMAWrites,
cuPointerSetAttribute) and "GPUDirect RDMA", chapter "Synchronization and Memory
Ordering".

There are two ways to register such memory. As a dmabuf: the GPU's driver hands the
pages to the card's through the kernel. As peer memory: the card's driver asks a module
of the GPU's (nvidia-peermem) what the address means, as if it were this process's
memory. The first is tried first; what each said is in the error if neither works.
"""

import ctypes
import mmap
import os
import sys
from bisect import bisect_right
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from infinistore.transports.rdma.devices import ROOT, Place, pci_place
from infinistore.transports.rdma.memory import RemoteSpan, SpanTable
from infinistore.transports.rdma.plan import Placement
from infinistore.transports.rdma.verbs import Device, NoRdma, Region

if TYPE_CHECKING:
    import torch


class DeviceMemory:
    """A span of the memory of the GPU `cuda:ordinal`, which `owner` keeps alive."""

    __slots__ = ("address", "length", "ordinal", "owner")

    def __init__(self, address: int, length: int, ordinal: int, owner: object) -> None:
        self.address = address
        self.length = length
        self.ordinal = ordinal
        self.owner = owner

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice) -> "DeviceMemory":
        start, stop, step = part.indices(self.length)
        if step != 1:
            raise ValueError("only what lies end to end in a GPU's memory can be cut out of it")
        return DeviceMemory(self.address + start, max(0, stop - start), self.ordinal, self.owner)

    def holds(self, other: "DeviceMemory") -> bool:
        """Whether all of the other, which may be of another GPU, lies in it."""
        return self.address <= other.address and other.address + other.length <= self.address + self.length

    @property
    def place(self) -> str:
        """The GPU, for people."""
        return f"cuda:{self.ordinal}"

    def __repr__(self) -> str:
        return f"<{self.length} bytes of {self.place} at 0x{self.address:x}>"


class Dmabuf(NamedTuple):
    """Memory as the kernel hands it from one driver to another: a descriptor, and where
    in it the memory begins.

    Who has it closes the descriptor, when the memory is registered or that has failed:
    the registration keeps what it needs.
    """

    fd: int
    offset: int


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
    """CUDA, with pages of `page_bytes`; `library` is None where it is missing. Any
    thread may ask.
    """

    def __init__(self, library: Any, page_bytes: int = mmap.PAGESIZE) -> None:
        self._library = library
        self._page_bytes = page_bytes

    def ordinal_at(self, address: int) -> int | None:
        """Return the GPU whose memory is at an address; None if it is no GPU's."""
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
        """Return a GPU's PCI address, as `0000:17:00.0`; None if unknown."""
        library, gpu, name = self._library, ctypes.c_int(), ctypes.create_string_buffer(_PCI_ADDRESS_BYTES)
        if library is None or library.cuInit(ctypes.c_uint(0)) != _SUCCESS:
            return None
        if library.cuDeviceGet(ctypes.byref(gpu), ctypes.c_int(ordinal)) != _SUCCESS:
            return None
        if library.cuDeviceGetPCIBusId(name, ctypes.c_int(_PCI_ADDRESS_BYTES), gpu) != _SUCCESS:
            return None
        return name.value.decode("ascii", "replace").lower()

    def export(self, memory: DeviceMemory) -> Dmabuf:
        """Return the pages of the memory, or its whole allocation, as a dmabuf.

        Raises:
            NoRdma: the driver, the GPU or this kind of memory does not allow it.
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
        """Make copies synchronous that CUDA calls so, where that can be asked for
        (CU_POINTER_ATTRIBUTE_SYNC_MEMOPS).
        """
        if self._library is not None:
            with suppress(NoRdma), self._context(memory.ordinal):
                self._library.cuPointerSetAttribute(
                    ctypes.byref(ctypes.c_uint(1)), ctypes.c_int(_SYNC_MEMOPS), ctypes.c_uint64(memory.address)
                )

    def record(self, ordinal: int) -> Any:
        """Return an event on PyTorch's current stream; without it, of all work."""
        return record_event(ordinal) if "torch" in sys.modules else ordinal

    def is_done(self, event: Any) -> bool:
        """Whether the event has come; False if unknown."""
        return not isinstance(event, int) and bool(event.query())

    def wait(self, event: Any) -> None:
        """Wait for the event. The interpreter's lock is free meanwhile."""
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
        """Enter the GPU's primary context, which is PyTorch's, and give the GPU."""
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
    """Return an event on the GPU's current stream in this thread, to be slept for."""
    import torch

    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def wait_for_event(event: "torch.cuda.Event") -> None:
    """Wait for an event that was recorded, in any thread."""
    import torch

    with torch.cuda.device(event.device):  # or a thread that is new to CUDA would begin to use the first GPU, too
        event.synchronize()


def load_cuda(library: str = LIBRARY) -> CudaDriver:
    """Return CUDA, whether it is there or not."""
    try:
        return CudaDriver(ctypes.CDLL(library))
    except OSError:
        return CudaDriver(None)


def current_gpu() -> int | None:
    """Return the number of PyTorch's current GPU; None if this process does not use one
    yet. Begins nothing: a process that has begun to use CUDA can no longer fork.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.current_device())


def gpu_place(cuda: CudaDriver, ordinal: int, root: Path = ROOT) -> Place | None:
    """Return where a GPU is; None if the driver or the kernel does not say."""
    address = cuda.pci_address(ordinal)
    return None if address is None else pci_place(address, root)


_REMEDY = (
    "as root: modprobe nvidia-peermem; or install NVIDIA's open kernel modules, on Linux 5.12 or newer (infinistore"
    " doctor tells what is there). Not registered, it is copied by way of the host by infinistore.tensors"
)


class DeviceSpan(RemoteSpan):
    """A span of a GPU's memory that an RDMA device knows, alive until `close`."""

    def __init__(self, device: Device, memory: DeviceMemory, cuda: CudaDriver) -> None:
        self.memory: DeviceMemory | None = memory
        super().__init__(memory.address, len(memory), _register(device, memory, cuda))
        # What is written to the device by a synchronous copy should be there when
        # somebody reads it by RDMA.
        cuda.order_copies(memory)

    def close(self) -> None:
        """Unregister: no peer reads or writes here afterwards. Idempotent."""
        super().close()
        self.memory = None


def _register(device: Device, memory: DeviceMemory, cuda: CudaDriver) -> Region:
    try:
        return _register_dmabuf(device, memory, cuda)
    except NoRdma as error:
        as_dmabuf = str(error)
    try:
        return device.register(memory.address, len(memory), remote=True)
    except NoRdma as error:
        raise NoRdma(
            f"memory of {memory.place} cannot be registered as a dmabuf ({as_dmabuf}), nor as peer memory ({error})",
            _REMEDY,
        ) from error


def _register_dmabuf(device: Device, memory: DeviceMemory, cuda: CudaDriver) -> Region:
    fd, offset = cuda.export(memory)
    try:
        return device.register_dmabuf(fd, offset, len(memory))
    finally:
        os.close(fd)


class RegisteredDeviceMemory(SpanTable[DeviceSpan]):
    """The registered spans of GPUs' memory, to be found by address."""

    def locate(self, blocks: Sequence[DeviceMemory]) -> Placement | None:
        """Return where the peer finds these blocks; None unless every one of them lies
        in registered memory.

        Where spans overlap, the one that begins last counts.
        """
        spans, starts = self.table
        addresses: list[int] = []
        keys: list[int] = []
        for block in blocks:
            found = bisect_right(starts, block.address) - 1
            if found < 0 or block.address + len(block) > spans[found].end:
                return None
            addresses.append(block.address + spans[found].shift)
            keys.append(spans[found].key)
        return Placement(addresses, keys)
