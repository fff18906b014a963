"""Blocks of tensors on GPUs that a card moves by itself, from where they are to where they belong.

That is possible where the store has registered the tensor's memory, RDMA is in use, and every block is one piece of
memory. In all other cases blocks are copied by way of the host, which is never wrong.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from infinistore.client.device_memory import DeviceBatch, DeviceMemory
from infinistore.tensors.cuda_copies import CudaCopies
from infinistore.tensors.devices import Transfer

if TYPE_CHECKING:
    from infinistore.blocking import BlockingStore
    from infinistore.client import AsyncStore

__all__ = ["direct_batch"]


def direct_batch(store: "BlockingStore | AsyncStore", batch: Sequence[Transfer]) -> DeviceBatch | None:
    """Return the blocks of these tensors where they lie, if all of them can be moved from and to there."""
    rdma = store._rdma()
    if rdma is None or not len(rdma.device_memory):
        return None
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
        blocks += [DeviceMemory(first + start, size, ordinal, tensor) for start in starts]
        waits.append((transfer.copies, transfer.after))
    if not blocks or rdma.device_memory.locate(blocks) is None:
        return None

    def wait() -> None:
        for copies, event in waits:
            copies.wait(event)

    return DeviceBatch([key for transfer in batch for key in transfer.blocks.keys], blocks, wait)
