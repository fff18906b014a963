"""Memory of this process that a peer may read and write by RDMA: its addresses and
keys.
"""

import ctypes
import mmap
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Generic, TypeVar

from infinistore.transports.rdma.plan import Placement
from infinistore.transports.rdma.verbs import Device, Region

_DONTFORK = 10  # MADV_DONTFORK, which the module mmap names on Linux only

_ADDRESS = attrgetter("address")


class RemoteSpan:
    """A registered span. `shift` leads from a local address to the peer's."""

    def __init__(self, address: int, length: int, region: Region) -> None:
        self.address = address
        self.end = address + length
        self.key = region.remote_key
        self.shift = region.remote_address - address
        self._region = region

    def close(self) -> None:
        """Unregister: no peer reads or writes here afterwards. Idempotent."""
        self._region.close()


class RegisteredSpan(RemoteSpan):
    """A span of this process's memory. It keeps the memory alive; `close` is final."""

    def __init__(self, device: Device, view: memoryview) -> None:
        self.view = view
        self.writable = not view.readonly
        address = address_of(view)
        super().__init__(address, len(view), device.register(address, len(view), remote=True, writable=self.writable))

    def close(self) -> None:
        """Unregister: no peer reads or writes here afterwards. Idempotent."""
        super().close()
        self.view = memoryview(b"")


_AnySpan = TypeVar("_AnySpan", bound=RemoteSpan)


class SpanTable(Generic[_AnySpan]):
    """Registered spans, by address.

    Other threads may look up while one changes them: they see the spans before a
    change, or after it.
    """

    def __init__(self) -> None:
        self.table: tuple[tuple[_AnySpan, ...], tuple[int, ...]] = (), ()
        """The spans and where each begins, by address; replaced as a whole."""

    def __len__(self) -> int:
        return len(self.table[0])

    def add(self, span: _AnySpan) -> None:
        """Add a span."""
        self._replace([*self.table[0], span])

    def remove(self, span: _AnySpan) -> None:
        """Remove a span, if it is there."""
        self._replace([known for known in self.table[0] if known is not span])

    def _replace(self, spans: Iterable[_AnySpan]) -> None:
        ordered = tuple(sorted(spans, key=_ADDRESS))
        self.table = ordered, tuple(map(_ADDRESS, ordered))


class RegisteredMemory(SpanTable[RegisteredSpan]):
    """The spans that a caller has registered, to be found by address."""

    def locate(self, views: Sequence[memoryview], *, writable: bool) -> Placement | None:
        """Return where the peer finds these views; None unless every one of them is in
        registered memory.

        Where spans overlap, the one with the highest start counts.
        """
        spans, starts = self.table
        if not spans:
            return None
        addresses: list[int] = []
        keys: list[int] = []
        span = spans[0]
        for view in views:
            address = address_of(view)
            if not span.address <= address <= address + len(view) <= span.end:
                found = bisect_right(starts, address) - 1
                span = spans[found]
                if found < 0 or address + len(view) > span.end:
                    return None
            if writable and not span.writable:
                return None
            addresses.append(address)
            keys.append(span.key)
        return Placement(addresses, keys)


class Staging:
    """A registered staging buffer, for blocks in memory that is not registered."""

    def __init__(self, device: Device, length: int) -> None:
        memory = mmap.mmap(-1, length)
        memory.madvise(_DONTFORK)
        self.span = RegisteredSpan(device, memoryview(memory))

    def __len__(self) -> int:
        return len(self.span.view)

    def views(self, lengths: Iterable[int]) -> list[memoryview]:
        """Return spans of these lengths, end to end."""
        memory = self.span.view
        views = []
        start = 0
        for length in lengths:
            views.append(memory[start : start + length])
            start += length
        return views


class _Buffer(ctypes.Structure):
    """The fields of Py_buffer that are read, and room for the rest."""

    _fields_ = (("address", ctypes.c_void_p), ("rest", ctypes.c_byte * 120))


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = [ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int]
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = [ctypes.POINTER(_Buffer)]
_release_buffer.restype = None


def address_of(view: memoryview) -> int:
    """Return the address of a contiguous view."""
    if not view.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(view)) if len(view) else 0
    buffer = _Buffer()
    _get_buffer(view, buffer, 0)
    try:
        return buffer.address or 0
    finally:
        _release_buffer(buffer)
