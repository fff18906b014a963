"""Blocks of tensors on GPUs that an RDMA card moves without a copy.

That is possible if the tensor's memory is registered with the store, RDMA is in use,
and every block is contiguous. All other blocks are copied by way of the host.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from infinistore.client.extension import DeviceBatch, DeviceMemory
from infinistore.tensors.copies import CudaCopies
from infinistore.tensors.devices import Transfer

if TYPE_CHECKING:
    from infinistore.blocking import BlockingStore
    from infinistore.client import AsyncStore

__all__ = ["direct_batch"]


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
