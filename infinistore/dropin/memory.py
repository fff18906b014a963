"""Views of the caller's memory by address and length. No copies, no references.

Each address is checked against the process's memory map. Memory that is unmapped or
read-only is refused when it is registered; accessing it later would kill the process.
"""

import ctypes
import mmap
import sys
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

from infinistore.client.extension import DeviceMemory, cuda_driver
from infinistore.errors import InvalidRequest
from infinistore.host import no_linux
from infinistore.sizes import in_units

_LARGEST_ADDRESS = (1 << 63) - 1
_MS_ASYNC = 1
_PY_BUF_WRITE = 0x200  # include/cpython: PyBUF_WRITE

_view_of_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view_of_memory.restype = ctypes.py_object
_msync = ctypes.CDLL(None, use_errno=True).msync
_msync.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Region(NamedTuple):
    """Writable memory: `view` contains its bytes, from `address` on.

    Only RDMA can move GPU memory.
    """

    address: int
    view: memoryview | DeviceMemory

    @property
    def end(self) -> int:
        """The first address after it."""
        return self.address + len(self.view)

    def block(self, address: int, size: int, *, clip: bool = False) -> memoryview | DeviceMemory:
        """Return the memory of a block in the region.

        With `clip`, the block may be cut off at the end of the region.

        Raises:
            InvalidRequest: the block is not in the region.
        """
        start = address - self.address
        view = self.view[start : start + size]
        if len(view) < size and not (clip and len(view)):
            raise InvalidRequest(
                f"{in_units(size)} at {address:#x} are not inside the memory that was registered,"
                f" {in_units(len(self.view))} at {self.address:#x}"
            )
        return view


class Regions:
    """The registered memory of one connection. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_address: dict[int, Region] = {}

    def add(self, region: Region) -> None:
        """Add a region; it replaces one with the same address."""
        with self._lock:
            self._by_address[region.address] = region

    def all(self) -> list[Region]:
        """Return all of them."""
        with self._lock:
            return list(self._by_address.values())

    def at(self, address: int) -> Region:
        """Return the region of an address.

        If several contain it: the one that begins there, else the one that ends last.

        Raises:
            InvalidRequest: no region contains the address.
        """
        _check_range(address, 1)
        region = self._by_address.get(address)
        if region is not None:
            return region
        around = [region for region in self.all() if region.address <= address < region.end]
        if not around:
            raise InvalidRequest(f"the memory at {address:#x} is not registered; call register_mr(ptr, size) first")
        return max(around, key=lambda region: region.end)

    def clear(self) -> None:
        """Remove all regions."""
        with self._lock:
            self._by_address.clear()


def find_region(address: int, size: int) -> Region:
    """Return writable memory of this process or of a GPU.

    Raises:
        InvalidRequest: it is neither, or it is read-only.
    """
    _check_range(address, size)
    try:
        _check_writable(address, size)
    except InvalidRequest:
        cuda = cuda_driver.load_cuda()
        ordinal = cuda.ordinal_at(address)
        if ordinal is None or cuda.ordinal_at(address + size - 1) != ordinal:
            raise
        return Region(address, DeviceMemory(address, size, ordinal, None))
    return Region(address, _view_of_memory(address, size, _PY_BUF_WRITE))


def _check_range(address: int, size: int) -> None:
    """Raise `InvalidRequest` for an impossible range of addresses."""
    if address <= 0:
        raise InvalidRequest(f"ptr is {address or 'null'}; give the address of the data")
    if size <= 0:
        raise InvalidRequest(f"a size must be at least 1 byte, not {size}")
    if address + size > _LARGEST_ADDRESS:
        raise InvalidRequest(f"no memory has {in_units(size)} at {address:#x}")


def readable_memory(address: int, size: int) -> memoryview:
    """Return a read-only view of memory that is not registered.

    Raises:
        InvalidRequest: it is not memory of this process.
    """
    _check_range(address, size)
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    if _msync(start, address + size - start, _MS_ASYNC):  # it writes nothing back, but finds what is not mapped
        raise InvalidRequest(f"{in_units(size)} at {address:#x} are not memory of this process")
    return memoryview(_view_of_memory(address, size, _PY_BUF_WRITE)).toreadonly()


def address_and_size(memory: Any) -> tuple[int, int]:
    """Return the address and the length in bytes of a tensor or a buffer.

    Raises:
        InvalidRequest: another type, or it is read-only or not contiguous.
    """
    if hasattr(memory, "data_ptr"):  # a tensor of PyTorch, which is not imported for that
        if not memory.is_contiguous():
            raise InvalidRequest("the tensor is not contiguous; pass tensor.contiguous()")
        return memory.data_ptr(), memory.numel() * memory.element_size()
    try:
        view = memoryview(memory)
        return ctypes.addressof(ctypes.c_char.from_buffer(view)), view.nbytes
    except (TypeError, ValueError, BufferError) as error:
        raise InvalidRequest(
            f"register_mr takes an address and a size, a tensor or a writable buffer, not {type(memory).__name__}:"
            f" {error}"
        ) from None


def _check_writable(address: int, size: int) -> None:
    """Raise `InvalidRequest` unless this process's memory map has it as writable.

    GPU memory is not in the map, or must not be touched.
    """
    reached = address
    for start, end, access in _mapped_spans():
        if start > reached:
            break
        if reached < end:
            if not access.startswith("rw"):
                raise InvalidRequest(
                    f"the memory at {reached:#x} cannot be written (its access is {access}); give memory that can"
                )
            reached = end
            if reached >= address + size:
                return
    raise InvalidRequest(f"{in_units(size)} at {address:#x} are not memory of this process, or end at {reached:#x}")


def _mapped_spans() -> Iterator[tuple[int, int, str]]:
    """The address space of this process: start, end and access, such as "rw-p"."""
    if sys.platform != "linux":
        raise no_linux("memory by its address", "give buffers to a store of open_store")
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            span, access, _ = line.split(" ", 2)
            start, end = span.split("-")
            yield int(start, 16), int(end, 16), access
