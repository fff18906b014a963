"""Which copies are for which tensor, and memory for blocks on their way where a device cannot reach the pool."""

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, finalize

import attrs

from infinistore.client.registration import Registration
from infinistore.tensors.cuda_copies import CudaCopies
from infinistore.tensors.cuda_runtime import TorchCuda, cuda_bindings
from infinistore.tensors.device_copies import CpuCopies, DeviceCopies
from infinistore.tensors.tensor_blocks import TensorBlocks

if TYPE_CHECKING:
    import torch

    from infinistore.blocking import BlockingStore
    from infinistore.client import AsyncStore

__all__ = ["Staging", "Transfer", "make_transfer"]


@attrs.frozen(eq=False)
class Transfer:
    """Blocks, how they are copied, and what must be done before they are."""

    blocks: TensorBlocks
    copies: DeviceCopies
    after: Any

    @property
    def on_device(self) -> bool:
        """Whether the tensor is out of this process's reach."""
        return not isinstance(self.copies, CpuCopies)


def make_transfer(store: "BlockingStore | AsyncStore", blocks: TensorBlocks) -> Transfer:
    """Get ready to copy blocks. Called by the thread that computes: what it told the device so far comes first."""
    copies = _copies_for(store, blocks.tensor)
    return Transfer(blocks, copies, copies.mark(blocks.tensor))


_CPU = CpuCopies()
# The memory of a store's pool can be registered only once in a process, whoever copies from and to it.
_CUDA: "WeakKeyDictionary[BlockingStore | AsyncStore, CudaCopies]" = WeakKeyDictionary()
_CUDA_LOCK = threading.Lock()


def _copies_for(store: "BlockingStore | AsyncStore", tensor: "torch.Tensor") -> DeviceCopies:
    if tensor.is_cpu:
        return _CPU
    with _CUDA_LOCK:
        copies = _CUDA.get(store)
        if copies is None:
            copies = _CUDA[store] = CudaCopies(TorchCuda(cuda_bindings()))
            finalize(store, copies.close).atexit = False
        return copies


class Staging:
    """Memory of this process for blocks of tensors on devices: used again and again, registered for RDMA once.

    For one thread. `store` is None where it is used once: registering takes longer than that saves.
    """

    def __init__(self, store: "BlockingStore | None") -> None:
        self._store = store
        self._memory: torch.Tensor | None = None
        self._registration: Registration | None = None

    def rows(self, transfers: Sequence[Transfer]) -> "list[torch.Tensor]":
        """Return room for the blocks of each: uint8, one row for each block. It is good until this is called again."""
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
            room = self._memory[first : first + blocks.total_bytes]
            found.append(room.view(len(blocks.keys), blocks.block_bytes))
            first += blocks.total_bytes
        return found

    def close(self) -> None:
        """Let go of the memory."""
        if self._registration is not None:
            self._registration.close()
        self._registration = self._memory = None
