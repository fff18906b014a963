"""What may be stored and what may be read into: anything with the buffer protocol, as plain bytes, never copied.

A contiguous array of any type is seen as its bytes. PyTorch tensors have no buffer protocol, and numpy has no
bfloat16; both are looked at through a view of their bytes. Neither library is imported here: who passes a tensor has
done that.
"""

import sys
from typing import Any, TypeAlias

__all__ = ["BufferLike", "readable", "writable"]

BufferLike: TypeAlias = Any
"""bytes, bytearray, memoryview, array, mmap, a numpy array, a PyTorch tensor on the CPU: contiguous, of any type."""


def readable(data: BufferLike) -> memoryview:
    """Return the bytes of `data`, which must not be empty.

    Raises:
        TypeError: it is no buffer.
        ValueError: it is empty, not contiguous, or not in this machine's memory.
    """
    view = _bytes_of(data)
    if not len(view):
        raise ValueError("a value has at least one byte; this one is empty")
    return view


def writable(buffer: BufferLike) -> memoryview:
    """Return the bytes of `buffer`, to be written.

    Raises:
        TypeError: it is no buffer, or read-only.
        ValueError: it is not contiguous, or not in this machine's memory.
    """
    view = _bytes_of(buffer)
    if view.readonly:
        raise TypeError(f"cannot read into a read-only {type(buffer).__name__}; give a bytearray or a writable array")
    return view


def _bytes_of(data: BufferLike) -> memoryview:
    # What a caller slices out of one large buffer comes here already in the right form, 64 of it in a batch.
    if type(data) is memoryview and data.format == "B" and data.ndim == 1 and data.contiguous:
        return data
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(data, torch.Tensor):
        return _bytes_of_tensor(data, torch)
    try:
        view = memoryview(data)
    except TypeError:
        raise TypeError(f"{type(data).__name__} has no buffer protocol; give bytes, an array or a tensor") from None
    except (ValueError, BufferError):
        # Element types that the buffer protocol cannot tell, such as bfloat16 of ml_dtypes, still have bytes.
        view = memoryview(data.view("uint8"))
    if not view.c_contiguous:
        raise ValueError(f"a {type(data).__name__} that is not contiguous cannot be moved as it is; make it contiguous")
    return view if view.ndim == 1 and view.format == "B" else view.cast("B")


def _bytes_of_tensor(tensor: Any, torch: Any) -> memoryview:
    if tensor.device.type != "cpu":
        raise ValueError(f"the tensor is on {tensor.device}; move it to the CPU first")
    if not tensor.is_contiguous():
        raise ValueError("the tensor is not contiguous; pass tensor.contiguous(), or a contiguous buffer to read into")
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())
