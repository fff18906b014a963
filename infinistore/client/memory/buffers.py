"""Values as plain bytes: converts any buffer to a byte view without copying it.

A contiguous array of any type is seen as its bytes. PyTorch tensors do not support the
buffer protocol, and numpy has no bfloat16; both are read through a view of their bytes.
This module imports neither library: a caller that passes a tensor has imported it
already.
"""

import re
import sys
from collections.abc import Collection
from typing import Any, TypeAlias

from infinistore.transports.cuda import DeviceMemory

__all__ = ["BufferLike", "OnDevice", "plain_bytes", "readable", "writable"]

_FIELD_NAME = re.compile(":[^:]*:")
BufferLike: TypeAlias = Any
"""bytes, bytearray, memoryview, array, mmap, a numpy array, a PyTorch tensor on the
CPU: contiguous, of any type."""


class OnDevice(ValueError):
    """GPU memory was given where bytes in this process's memory are required."""


def readable(data: BufferLike) -> memoryview:
    """Return the bytes of `data`, which must not be empty.

    Raises:
        TypeError: it does not support the buffer protocol.
        ValueError: it is empty, not contiguous, or not in this machine's memory.
    """
    view = _bytes_of(data)
    if not len(view):
        raise ValueError("a value has at least one byte; this one is empty")
    return view


def writable(buffer: BufferLike) -> memoryview:
    """Return the bytes of `buffer` as writable memory.

    Raises:
        TypeError: it does not support the buffer protocol, or is read-only.
        ValueError: it is not contiguous, or not in this machine's memory.
    """
    view = _bytes_of(buffer)
    if view.readonly:
        raise TypeError(f"cannot read into a read-only {type(buffer).__name__}; give a bytearray or a writable array")
    return view


def plain_bytes(batch: Collection[BufferLike]) -> list[memoryview] | None:
    """Return the batch unchanged if all items are non-empty views of bytes, else None.

    This is the case for slices of one large buffer. Converting 64 of those one by one
    takes three times as long.
    """
    if set(map(type, batch)) != {memoryview} or not all(batch):
        return None
    if any([view.format != "B" or view.ndim != 1 or not view.contiguous for view in batch]):  # noqa: C419 - quicker
        return None
    return list(batch)


def _bytes_of(data: BufferLike) -> memoryview:
    if type(data) is memoryview and data.format == "B" and data.ndim == 1 and data.contiguous:
        return data
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(data, torch.Tensor):
        return _bytes_of_tensor(data, torch)
    try:
        view = memoryview(data)
    except TypeError:
        if isinstance(data, DeviceMemory):
            raise OnDevice(f"{data!r} is not this process's; move it to the CPU first") from None
        raise TypeError(f"{type(data).__name__} has no buffer protocol; give bytes, an array or a tensor") from None
    except (ValueError, BufferError) as error:
        view = _bytes_of_array(data, error)
    if not view.c_contiguous:
        raise ValueError(f"a {type(data).__name__} that is not contiguous cannot be moved as it is; make it contiguous")
    return view if view.ndim == 1 and view.format == "B" else _without_type(view)


def _without_type(view: memoryview) -> memoryview:
    if "O" in _FIELD_NAME.sub("", view.format):
        raise TypeError("an array of Python objects holds addresses, not values; give one of numbers")
    # an empty view cannot be cast
    if not view.nbytes:
        return memoryview(b"" if view.readonly else bytearray())
    return view.cast("B")


def _bytes_of_array(data: Any, error: Exception) -> memoryview:
    """Return the bytes of an array whose element type the buffer protocol lacks.

    Examples are times, and bfloat16 of ml_dtypes.
    """
    if not hasattr(data, "view"):
        raise ValueError(f"the memory of this {type(data).__name__} cannot be used: {error}")
    if not data.flags.c_contiguous:
        raise ValueError(f"a {type(data).__name__} that is not contiguous cannot be moved as it is; make it contiguous")
    return memoryview(data.reshape(-1).view("uint8"))


def _bytes_of_tensor(tensor: Any, torch: Any) -> memoryview:
    if tensor.device.type != "cpu":
        kind = OnDevice if tensor.device.type == "cuda" else ValueError
        raise kind(f"the tensor is on {tensor.device}; move it to the CPU first")
    if not tensor.is_contiguous():
        raise ValueError("the tensor is not contiguous; pass tensor.contiguous(), or a contiguous buffer to read into")
    try:
        return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())
    # a lazy conjugate or negative: the bytes in memory are not the tensor's values
    except RuntimeError as error:
        raise ValueError(f"{error} Pass tensor.resolve_conj().resolve_neg()") from None
