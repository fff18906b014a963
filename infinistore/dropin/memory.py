"""The caller's memory, named by address and length, as views: nothing is copied, and nothing is kept alive.

An address is taken at its word only after a look at the process's own map. Memory that is not there, or cannot be
written, gets an error when it is registered, where touching it later would kill the process.
"""

import ctypes
import mmap
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

from infinistore.client.device_memory import DeviceMemory, cuda_driver
from infinistore.errors import InvalidRequest

__all__ = ["Region", "Regions", "address_and_size", "find_region", "readable_memory"]

_LARGEST_ADDRESS = (1 << 63) - 1
_MS_ASYNC = 1
_PY_BUF_WRITE = 0x200  # include/cpython: PyBUF_WRITE

_view_of_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view_of_memory.restype = ctypes.py_object
_msync = ctypes.CDLL(None, use_errno=True).msync
_msync.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Region(NamedTuple):
    """Memory that can be read and written: `view` has its bytes, from `address` on. A GPU's only RDMA can move."""

    address: int
    view: memoryview | DeviceMemory

    @property
    def end(self) -> int:
        """The first address behind it."""
        return self.address + len(self.view)

    def block(self, address: int, size: int, *, clip: bool = False) -> memoryview | DeviceMemory:
        """Return the memory of a block inside. With `clip`, less than `size` will do, up to the end of the region.

        Raises:
            InvalidRequest: it is not inside.
        """
        start = address - self.address
        view = self.view[start : start + size]
        if len(view) < size and not (clip and len(view)):
            raise InvalidRequest(
                f"{size} bytes at {address:#x} are not inside the memory that was registered,"
                f" {len(self.view)} bytes at {self.address:#x}"
            )
        return view


class Regions:
    """What was registered on one connection. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_address: dict[int, Region] = {}

    def add(self, region: Region) -> None:
        """Take it up; what began at its address before is forgotten."""
        with self._lock:
            self._by_address[region.address] = region

    def all(self) -> list[Region]:
        """Return all of them."""
        with self._lock:
            return list(self._by_address.values())

    def at(self, address: int) -> Region:
        """Return the region that an address is in: the one that begins there, else the one that reaches furthest.

        Raises:
            InvalidRequest: it is in none.
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
        """Forget all of it."""
        with self._lock:
            self._by_address.clear()


def find_region(address: int, size: int) -> Region:
    """Return memory that can be read and written: of this process, or of a GPU.

    Raises:
        InvalidRequest: it is neither, or it cannot be written.
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
    """Raise `InvalidRequest` unless this can be memory at all."""
    if address <= 0:
        raise InvalidRequest(f"ptr is {address or 'null'}; give the address of the data")
    if size <= 0:
        raise InvalidRequest(f"a size must be at least 1 byte, not {size}")
    if address + size > _LARGEST_ADDRESS:
        raise InvalidRequest(f"no memory has {size} bytes at {address:#x}")


def readable_memory(address: int, size: int) -> memoryview:
    """Return the bytes of memory that was not registered, to be read.

    Raises:
        InvalidRequest: there is none.
    """
    _check_range(address, size)
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    if _msync(start, address + size - start, _MS_ASYNC):  # it writes nothing back, but finds what is not mapped
        raise InvalidRequest(f"{size} bytes at {address:#x} are not memory of this process")
    return memoryview(_view_of_memory(address, size, _PY_BUF_WRITE)).toreadonly()


def address_and_size(memory: Any) -> tuple[int, int]:
    """Return where a tensor, or anything else with the buffer protocol, is, and how many bytes it has.

    Raises:
        InvalidRequest: it is none, read-only, or not contiguous.
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
    """Look the memory up in this process's map. Memory of a GPU is not there, or is not to be touched."""
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
    raise InvalidRequest(f"{size} bytes at {address:#x} are not memory of this process, or end at {reached:#x}")


def _mapped_spans() -> Iterator[tuple[int, int, str]]:
    """The address space of this process in order: from, to, and how it may be used, such as "rw-p"."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            span, access, _ = line.split(" ", 2)
            start, end = span.split("-")
            yield int(start, 16), int(end, 16), access
