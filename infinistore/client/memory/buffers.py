"""Memory of callers: any buffer as plain bytes, without copying it; CUDA tensors; and
what a caller has registered with a store.

A contiguous array of any type is seen as its bytes. PyTorch tensors do not support the
buffer protocol, and numpy has no bfloat16; both are read through a view of their bytes.
This module imports neither library: a caller that passes a tensor has imported it
already.

A CUDA tensor is memory of a GPU, which this process describes but never accesses. It is
seen as its bytes, like any buffer. A transfer from or to it is ordered after the work
that was queued on the caller's current stream before the call: the batch records that
point when it is made, and the call waits for it before any byte is moved.
"""

import re
import sys
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeAlias

from infinistore.transports import cuda as cuda_driver
from infinistore.transports.cuda import DeviceMemory

if TYPE_CHECKING:
    from typing_extensions import Buffer

_FIELD_NAME = re.compile(":[^:]*:")
_as_view: Callable[[Any], memoryview] = memoryview


class _Array(Protocol):
    """A numpy array, whose stubs name no `__buffer__` before Python 3.12."""

    @property
    def __array_interface__(self) -> Any: ...


class _Tensor(Protocol):
    """A PyTorch tensor."""

    def data_ptr(self) -> int: ...


BufferLike: TypeAlias = "Buffer | _Array | _Tensor | DeviceMemory"
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
    """Return the views of a batch if all of its items are plain bytes: one dimension,
    contiguous, not empty; else None.

    `readable` accepts more, and takes more than twice as long.
    """
    views: list[memoryview] = []
    try:
        for view in map(_as_view, batch):
            if view.format != "B" or view.ndim != 1 or not view.contiguous:
                return None
            views.append(view)
    except (TypeError, ValueError, BufferError):  # a tensor, for example
        return None
    return views if all(views) else None


def _bytes_of(data: BufferLike) -> memoryview:
    if type(data) is memoryview and data.format == "B" and data.ndim == 1 and data.contiguous:
        return data
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(data, torch.Tensor):
        return _bytes_of_tensor(data, torch)
    try:
        view = _as_view(data)
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


class DeviceBatch(NamedTuple):
    """Keys, and for each of them the GPU memory to store or to read into.

    `wait` returns when the GPUs have finished the work that was queued before the batch
    was made; `is_done` tells whether they have finished already, as far as this is
    known.
    """

    keys: list[str]
    blocks: list[DeviceMemory]
    wait: Callable[[], None]
    is_done: Callable[[], bool] = lambda: False

    def at(self, positions: Sequence[int]) -> "DeviceBatch":
        """Return the part of the batch at these positions."""
        keys, blocks = [self.keys[i] for i in positions], [self.blocks[i] for i in positions]
        return DeviceBatch(keys, blocks, self.wait, self.is_done)


def device_batch(keys: list[str], tensors: Collection[BufferLike]) -> DeviceBatch:
    """Return a batch of tensors that are all on GPUs.

    Raises:
        ValueError: some are not, or one is not contiguous or has no bytes of its own.
    """
    on_cpu = next((tensor for tensor in tensors if not _is_on_gpu(tensor)), None)
    if on_cpu is not None:
        raise ValueError(
            f"one batch has a {type(on_cpu).__name__} beside CUDA tensors; make two calls: one for what is on GPUs, and"
            " one for the rest"
        )
    blocks = list(map(device_memory, tensors))
    cuda = cuda_driver.load_cuda()
    events = [cuda.record(ordinal) for ordinal in sorted({block.ordinal for block in blocks})]

    def wait() -> None:
        for event in events:
            cuda.wait(event)

    return DeviceBatch(keys, blocks, wait, lambda: all(map(cuda.is_done, events)))


def registrable(buffer: BufferLike) -> memoryview | DeviceMemory:
    """Return the bytes of memory to be registered, on the host or on a GPU.

    Raises:
        TypeError, ValueError: as for `readable` and `device_memory`.
    """
    try:
        return readable(buffer)
    except OnDevice:
        return device_memory(buffer)


def device_memory(tensor: Any) -> DeviceMemory:
    """Return the bytes of a CUDA tensor of any element type.

    A `DeviceMemory` that was made from an address is returned unchanged.

    Raises:
        ValueError: it is not contiguous, is empty, or its bytes are not its values.
    """
    if isinstance(tensor, DeviceMemory):
        return tensor
    torch = sys.modules["torch"]  # a caller that passes a tensor has imported it
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise ValueError("the tensor is not contiguous; pass tensor.contiguous(), or a contiguous tensor to read into")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError("the tensor is a lazy conjugate or negative; pass tensor.resolve_conj().resolve_neg()")
    length = tensor.numel() * tensor.element_size()
    if not length:
        raise ValueError("a value has at least one byte; this tensor is empty")
    if tensor.untyped_storage().device != tensor.device:
        raise ValueError("the tensor has no memory of its own (a fake tensor); pass a real one")
    return DeviceMemory(tensor.data_ptr(), length, tensor.device.index or 0, tensor)


def _is_on_gpu(data: BufferLike) -> bool:
    if isinstance(data, DeviceMemory):
        return True
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(data, torch.Tensor) and data.device.type == "cuda"


class Registration:
    """Registered memory, until `close`, the end of a `with` statement, or of the store.

    It is memory of this process, or of a GPU. RDMA moves blocks in it without a copy.
    Without RDMA, it has no effect and no cost. It keeps the memory alive.

    A call that moves bytes from or to this memory while it is closed continues without
    RDMA, or fails. When `close` has returned, no other machine accesses the memory.
    """

    def __init__(self, length: int, unregister: "Callable[[Registration], None] | None" = None) -> None:
        self.length = length
        """Length in bytes."""
        self.registered = False
        """Whether it is registered with an RDMA device; always false without RDMA."""
        self.problem = ""
        """Why the registration failed, if it was tried after `register` had returned.
        """
        self.view = memoryview(b"")
        self.device_memory: DeviceMemory | None = None
        self._unregister = unregister

    def close(self) -> None:
        """Unregister the memory. Idempotent."""
        unregister, self._unregister = self._unregister, None
        if unregister is not None:
            unregister(self)
        self.registered = False
        self.view = memoryview(b"")
        self.device_memory = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        without = "" if self.registered else f", {self.problem or 'without RDMA'}"
        return f"<Registration of {self.length} bytes{without}>"
