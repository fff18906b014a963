"""`write_blocks` and `read_blocks`: blocks of a tensor, by byte offset, in the manner of the original InfiniStore."""

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, overload

from infinistore.blocking import BlockingStore
from infinistore.client import AsyncStore
from infinistore.tensors.devices import Staging, Transfer, make_transfer
from infinistore.tensors.tensor_blocks import Blocks, blocks_to_read, blocks_to_write
from infinistore.tensors.transfers import get_blocks, get_blocks_async, put_blocks, put_blocks_async

if TYPE_CHECKING:
    import torch

__all__ = ["read_blocks", "write_blocks"]


@overload
def write_blocks(store: BlockingStore, blocks: Blocks, block_size_bytes: int, tensor: "torch.Tensor") -> None: ...
@overload
def write_blocks(
    store: AsyncStore, blocks: Blocks, block_size_bytes: int, tensor: "torch.Tensor"
) -> Awaitable[None]: ...
def write_blocks(
    store: BlockingStore | AsyncStore, blocks: Blocks, block_size_bytes: int, tensor: "torch.Tensor"
) -> Awaitable[None] | None:
    """Store blocks of a tensor, all of one size, visible all at once. Await it if the store is asynchronous.

    `blocks` are pairs of a key and the offset in bytes where the block begins. Offsets count the bytes of the elements
    in logical order: those of `tensor.contiguous()`. Any dtype, any strides; only where a block is scattered over
    memory are they copied once more. The tensor must not change before the call is done.

    Raises:
        ValueError, TypeError: a block outside the tensor, a key twice, a tensor without plain memory on the CPU or a
            CUDA device. Nothing was stored.
        OutOfMemory, ValueTooLarge, LimitExceeded, StoreUnavailable, DeadlineExceeded: as of the store's `put_many`.
    """
    checked = blocks_to_write(tensor, blocks, block_size_bytes)
    if isinstance(store, AsyncStore):
        return put_blocks_async(store, [make_transfer(store, checked)])
    put_blocks(_blocking(store), [make_transfer(store, checked)], Staging(None))
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
    """Read blocks into a tensor: all of them, or an error. Await it if the store is asynchronous.

    The arguments are those of `write_blocks`; two blocks must not overlap. After an error, what is in the blocks' part
    of the tensor is undefined, and nothing else of it has changed.

    Raises:
        BlocksMissing: some are not there; its `keys` says which. (It is a `KeyNotFound`.)
        BlockSizeMismatch: a stored block is longer or shorter than `block_size_bytes`.
        ChecksumMismatch: the bytes are not those that were written.
        ValueError, TypeError: as of `write_blocks`. Nothing was asked for.
        StoreUnavailable, DeadlineExceeded: as of the store's `get_many_into`.
    """
    checked = blocks_to_read(tensor, blocks, block_size_bytes)
    if isinstance(store, AsyncStore):
        return _read_async(store, make_transfer(store, checked))
    (problem,) = get_blocks(_blocking(store), [make_transfer(store, checked)], Staging(None))
    if problem is not None:
        raise problem
    return None


async def _read_async(store: AsyncStore, transfer: Transfer) -> None:
    (problem,) = await get_blocks_async(store, [transfer])
    if problem is not None:
        raise problem


def _blocking(store: Any) -> BlockingStore:
    if not isinstance(store, BlockingStore):
        raise TypeError(f"give a store, as open_store makes it, not {type(store).__name__}")
    return store
