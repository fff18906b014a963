"""CUDA tensors as GPU memory, which this process describes but never accesses.

A tensor is seen as its bytes, like any buffer. A transfer from or to it is ordered
after the work that was queued on the caller's current stream before the call: the batch
records that point when it is made, and the call waits for it before any byte is moved.
"""

import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from infinistore.client.memory.buffers import BufferLike, OnDevice, readable
from infinistore.transports import cuda as cuda_driver
from infinistore.transports.cuda import DeviceMemory

__all__ = ["DeviceBatch", "device_batch", "device_memory", "registrable"]


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
