"""Which way suits which tensor: the copies of its device, with staging memory, or an
RDMA card that moves the blocks without a copy.

The latter is possible if the tensor is on a GPU and its memory is registered with the
store, RDMA is in use, and every block is contiguous. All other blocks are copied by way
of the host.
"""

import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary, finalize

import attrs

from infinistore.client import Registration
from infinistore.client.extension import DeviceBatch, DeviceMemory, in_thread
from infinistore.tensors.copies import CpuCopies, CudaCopies, DeviceCopies, MappedArena
from infinistore.tensors.cuda_runtime import TorchCuda, cuda_bindings
from infinistore.tensors.tensor_blocks import TensorBlocks

if TYPE_CHECKING:
    import torch

    from infinistore.blocking import BlockingStore
    from infinistore.client import AsyncStore


_T = TypeVar("_T")


@attrs.frozen(eq=False)
class Transfer:
    """Blocks, how they are copied, and the event that must come first."""

    blocks: TensorBlocks
    copies: DeviceCopies
    after: Any

    @property
    def on_device(self) -> bool:
        """Whether this process cannot access the tensor's memory."""
        return not isinstance(self.copies, CpuCopies)


def make_transfer(store: "BlockingStore | AsyncStore", blocks: TensorBlocks) -> Transfer:
    """Prepare to copy blocks. The thread that computes calls this.

    The copy waits for the work that this thread has queued so far.
    """
    copies = copies_for(store, blocks.tensor)
    return Transfer(blocks, copies, copies.mark(blocks.tensor))


async def beside_loop(batch: Sequence[Transfer], work: Callable[[], _T]) -> _T:
    """Do work on these blocks, in a thread if it copies or asks a device.

    Other work takes less time than a thread.
    """
    if any(transfer.on_device or transfer.blocks.starts is None for transfer in batch):
        return await in_thread(work)
    return work()


def any_on_device(batch: Sequence[Transfer]) -> bool:
    """Tell whether this process cannot access the memory of one of the tensors."""
    return any(transfer.on_device for transfer in batch)


def pin_pool(store: "BlockingStore | AsyncStore", batch: Sequence[Transfer]) -> bool:
    """Pin the store's pool for the device of these tensors.

    Returns False if the pool is not mapped into this process.
    """
    on_device = next(transfer for transfer in batch if transfer.on_device)
    assert isinstance(on_device.copies, CudaCopies)  # all devices of a store have the same copies
    arenas = [MappedArena(*arena) for arena in store.mapped_arenas()]
    on_device.copies.use_pool(arenas, on_device.blocks.tensor.device)
    return bool(arenas)


_CPU = CpuCopies()
# The memory of a store's pool can be registered only once in a process, whoever copies
# from and to it.
_CUDA: "WeakKeyDictionary[BlockingStore | AsyncStore, CudaCopies]" = WeakKeyDictionary()
_cuda_lock = threading.Lock()


def _after_fork_in_child() -> None:
    # It may have been held by a thread that the child does not have.
    global _cuda_lock  # noqa: PLW0603
    _cuda_lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)


def copies_for(store: "BlockingStore | AsyncStore", tensor: "torch.Tensor") -> DeviceCopies:
    """Return what copies the blocks of this tensor: one engine for each store."""
    if tensor.is_cpu:
        return _CPU
    with _cuda_lock:
        copies = _CUDA.get(store)
        if copies is None:
            copies = _CUDA[store] = CudaCopies(TorchCuda(cuda_bindings()))
            finalize(store, copies.close).atexit = False
        return copies


class Staging:
    """Reusable host memory for blocks of tensors on devices, registered for RDMA once.

    For one thread. `store` is None for a single use: registering takes longer than it
    saves.
    """

    def __init__(self, store: "BlockingStore | None") -> None:
        self._store = store
        self._memory: torch.Tensor | None = None
        self._registration: Registration | None = None

    def rows(self, transfers: Sequence[Transfer]) -> "list[torch.Tensor]":
        """Return memory for the blocks of each transfer: uint8, one row for each block.

        It is valid until the next call.
        """
        if not transfers:
            return []
        total_bytes = max(1, sum(transfer.blocks.total_bytes for transfer in transfers))
        if self._memory is None or self._memory.numel() < total_bytes:
            self.close()
            self._memory = transfers[0].copies.host_memory(total_bytes)
            if self._store is not None:
                self._registration = self._store.register(self._memory)
        found: list[torch.Tensor] = []
        first = 0
        for blocks in (transfer.blocks for transfer in transfers):
            part = self._memory[first : first + blocks.total_bytes]
            found.append(part.view(len(blocks.keys), blocks.block_bytes))
            first += blocks.total_bytes
        return found

    def close(self) -> None:
        """Release the memory."""
        if self._registration is not None:
            self._registration.close()
        self._registration = self._memory = None


def direct_batch(store: "BlockingStore | AsyncStore", batch: Sequence[Transfer]) -> DeviceBatch | None:
    """Return the blocks of these tensors in place, if RDMA can move all of them."""
    blocks: list[DeviceMemory] = []
    waits: list[tuple[CudaCopies, object]] = []
    for transfer in batch:
        tensor, starts = transfer.blocks.tensor, transfer.blocks.starts
        if not isinstance(transfer.copies, CudaCopies) or starts is None:
            return None
        first, size, ordinal = (
            tensor.untyped_storage().data_ptr(),
            transfer.blocks.block_bytes,
            tensor.device.index or 0,
        )
        # The first block first: where it is not registered, the others are not looked
        # at.
        if starts and not store.has_registered([DeviceMemory(first + starts[0], size, ordinal, tensor)]):
            return None
        blocks += [DeviceMemory(first + start, size, ordinal, tensor) for start in starts]
        waits.append((transfer.copies, transfer.after))
    if not blocks or not store.has_registered(blocks):
        return None

    def wait() -> None:
        for copies, event in waits:
            copies.wait(event)

    return DeviceBatch([key for transfer in batch for key in transfer.blocks.keys], blocks, wait)
