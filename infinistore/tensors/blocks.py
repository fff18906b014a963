"""`write_blocks` and `read_blocks`: blocks of a tensor, by byte offset.

The interface resembles that of the original InfiniStore.
"""

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, overload

from infinistore.blocking import BlockingStore
from infinistore.client import AsyncStore
from infinistore.tensors import blocking_transfers, transfers
from infinistore.tensors.devices import Staging, Transfer, make_transfer
from infinistore.tensors.tensor_blocks import Blocks, blocks_to_read, blocks_to_write

if TYPE_CHECKING:
    import torch


@overload
def write_blocks(store: BlockingStore, blocks: Blocks, block_size_bytes: int, tensor: "torch.Tensor") -> None: ...
@overload
def write_blocks(
    store: AsyncStore, blocks: Blocks, block_size_bytes: int, tensor: "torch.Tensor"
) -> Awaitable[None]: ...
def write_blocks(
    store: BlockingStore | AsyncStore, blocks: Blocks, block_size_bytes: int, tensor: "torch.Tensor"
) -> Awaitable[None] | None:
    """Store blocks of a tensor, all of one size, which become visible in one step.

    Await the result if the store is asynchronous. `blocks` are pairs of a key and the
    offset of the block in bytes. Offsets count the bytes of the elements in logical
    order, as in `tensor.contiguous()`. The tensor may have any dtype and any strides.
    Blocks that are scattered in memory are copied once more. The tensor must not change
    until the call has returned.

    Raises:
        ValueError, TypeError: a block outside the tensor, a duplicate key, a tensor
            without plain memory on the CPU or a CUDA device. Nothing was stored.
        OutOfMemory, ValueTooLarge, LimitExceeded, StoreUnavailable, DeadlineExceeded:
            as in the store's `put_many`.
    """
    checked = blocks_to_write(tensor, blocks, block_size_bytes)
    if isinstance(store, AsyncStore):
        return transfers.put_blocks(store, [make_transfer(store, checked)], Staging(None))
    blocking_transfers.put_blocks(_blocking(store), [make_transfer(store, checked)], Staging(None))
    return None


@overload
def read_blocks(store: BlockingStore, blocks: Blocks, block_size_bytes: int, tensor: "torch.Tensor") -> None: ...
@overload
def read_blocks(
    store: AsyncStore, blocks: Blocks, block_size_bytes: int, tensor: "torch.Tensor"
) -> Awaitable[None]: ...
def read_blocks(
    store: BlockingStore | AsyncStore, blocks: Blocks, block_size_bytes: int, tensor: "torch.Tensor"
) -> Awaitable[None] | None:
    """Read blocks into a tensor: all of them, or an error.

    Await the result if the store is asynchronous. The arguments are those of
    `write_blocks`; the blocks must not overlap. After an error, the blocks' part of the
    tensor is undefined; the rest of the tensor is unchanged.

    Raises:
        BlocksMissing: some blocks do not exist: those of its `keys`. (A `KeyNotFound`.)
        BlockSizeMismatch: a stored block is longer or shorter than `block_size_bytes`.
        ChecksumMismatch: the bytes are not those that were written.
        ValueError, TypeError: as in `write_blocks`. Nothing was sent.
        StoreUnavailable, DeadlineExceeded: as in the store's `get_many_into`.
    """
    checked = blocks_to_read(tensor, blocks, block_size_bytes)
    if isinstance(store, AsyncStore):
        return _read_async(store, make_transfer(store, checked))
    (problem,) = blocking_transfers.get_blocks(_blocking(store), [make_transfer(store, checked)], Staging(None))
    if problem is not None:
        raise problem.again()
    return None


async def _read_async(store: AsyncStore, transfer: Transfer) -> None:
    (problem,) = await transfers.get_blocks(store, [transfer], Staging(None))
    if problem is not None:
        raise problem.again()


def _blocking(store: Any) -> BlockingStore:
    if not isinstance(store, BlockingStore):
        raise TypeError(f"give a store, as open_store makes it, not {type(store).__name__}")
    return store
