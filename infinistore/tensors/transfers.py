"""Blocks of tensors put into a store and read from one: several tensors' blocks in one batch.

Where the bytes go, by where the tensor is and whether the store's pool is mapped into this process:

* On the CPU, in one piece each: the store moves them from and to the tensor itself.
* On the CPU, scattered: by way of a contiguous copy.
* On a GPU, in memory that is registered for RDMA: between the GPU and the server (`direct`).
* On a device, the pool mapped: between the device and the pool, under a reservation or a lease.
* On a device otherwise: by way of memory of this process that the device likes.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from infinistore.client.device_calls import get_device_into, get_device_into_async, put_device, put_device_async
from infinistore.client.operations import Batch
from infinistore.client.threads import in_thread
from infinistore.errors import BufferTooSmall, DeviceMemoryUnreachable, InfiniStoreException, LimitExceeded
from infinistore.tensors.cuda_copies import CudaCopies, MappedArena
from infinistore.tensors.devices import Staging, Transfer
from infinistore.tensors.direct import direct_batch
from infinistore.tensors.errors import BlockSizeMismatch, BlocksMissing
from infinistore.tensors.tensor_blocks import TensorBlocks, bytes_of_storage

if TYPE_CHECKING:
    import torch

    from infinistore.blocking import BlockingStore
    from infinistore.client import AsyncStore

__all__ = ["get_blocks", "get_blocks_async", "put_blocks", "put_blocks_async"]

_T = TypeVar("_T")
_Problem: TypeAlias = InfiniStoreException | None


def put_blocks(store: "BlockingStore", batch: Sequence[Transfer], staging: Staging) -> None:
    """Store the blocks of all these tensors, visible at once."""
    if (direct := direct_batch(store, batch)) is not None:
        with suppress(DeviceMemoryUnreachable):  # nothing was stored
            put_device(store, direct, True)
            return
    if _is_within_reach(store, batch) and _put_in_place(store, batch):
        return
    store._put_batch(_sources(batch, staging))


async def put_blocks_async(store: "AsyncStore", batch: Sequence[Transfer]) -> None:
    """The same for an asynchronous store."""
    if (direct := direct_batch(store, batch)) is not None:
        with suppress(DeviceMemoryUnreachable):
            await put_device_async(store, direct, True)
            return
    await store._put_batch(await _beside_loop(batch, lambda: _sources(batch, Staging(None))))


def get_blocks(store: "BlockingStore", batch: Sequence[Transfer], staging: Staging) -> list[_Problem]:
    """Read the blocks of all these tensors; return for each tensor None, or what was wrong with its blocks.

    Raises:
        BlockSizeMismatch: a stored block is longer than its place in a tensor; nothing was written to any.
    """
    if (direct := direct_batch(store, batch)) is not None:
        with suppress(DeviceMemoryUnreachable), _longer_blocks_refused():
            return _problems(batch, get_device_into(store, direct, False))
    if _is_within_reach(store, batch):
        return _get_in_place(store, batch)
    targets = _targets(batch, staging)
    with _longer_blocks_refused():
        lengths = store.get_many_into(pair for target in targets for pair in target.pairs)
    return _finish(targets, lengths)


async def get_blocks_async(store: "AsyncStore", batch: Sequence[Transfer]) -> list[_Problem]:
    """The same for an asynchronous store."""
    if (direct := direct_batch(store, batch)) is not None:
        with suppress(DeviceMemoryUnreachable), _longer_blocks_refused():
            return _problems(batch, await get_device_into_async(store, direct, False))
    targets = await _beside_loop(batch, lambda: _targets(batch, Staging(None)))
    with _longer_blocks_refused():
        lengths = await store.get_many_into(pair for target in targets for pair in target.pairs)
    return await _beside_loop(batch, lambda: _finish(targets, lengths))


async def _beside_loop(batch: Sequence[Transfer], work: Callable[[], _T]) -> _T:
    """Do in a thread what copies, or asks a device; the rest takes less time than a thread."""
    if any(transfer.on_device or transfer.blocks.starts is None for transfer in batch):
        return await in_thread(work)
    return work()


# Between a device and the pool


def _is_within_reach(store: "BlockingStore", batch: Sequence[Transfer]) -> bool:
    """Whether a device is concerned and the pool is mapped; if so, it is pinned for the device."""
    found = next((transfer for transfer in batch if isinstance(transfer.copies, CudaCopies)), None)
    if found is None:
        return False
    arenas = [MappedArena(*arena) for arena in store._mapped_arenas()]
    assert isinstance(found.copies, CudaCopies)
    found.copies.use_pool(arenas, found.blocks.tensor.device)  # all devices of a store have the same copies
    return bool(arenas)


def _put_in_place(store: "BlockingStore", batch: Sequence[Transfer]) -> bool:
    """Copy into the pool; False if it takes not so much at once."""
    sizes = {key: transfer.blocks.block_bytes for transfer in batch for key in transfer.blocks.keys}
    try:
        with store.reserve(sizes) as views:
            _copy_out(batch, views)
    except LimitExceeded:
        return False
    return True


def _copy_out(batch: Sequence[Transfer], views: Sequence[memoryview]) -> None:
    for transfer, part in zip(batch, _parts(batch, views), strict=True):
        transfer.copies.to_host(transfer.blocks, part, transfer.after)


def _get_in_place(store: "BlockingStore", batch: Sequence[Transfer]) -> list[_Problem]:
    keys = [key for transfer in batch for key in transfer.blocks.keys]
    with store.lease(keys, verify=store._verifies()) as views:
        return _copy_in(batch, views)


def _copy_in(batch: Sequence[Transfer], views: Sequence[memoryview | None]) -> list[_Problem]:
    # In a function of its own: a view that a variable holds when the lease is left counts as in use.
    problems: list[_Problem] = []
    for transfer, part in zip(batch, _parts(batch, views), strict=True):
        problem = _find_problem(transfer.blocks, [None if view is None else len(view) for view in part])
        if problem is None:
            transfer.copies.to_device([view for view in part if view is not None], transfer.blocks, transfer.after)
        problems.append(problem)
    return problems


# By way of this process's memory, and without


def _sources(batch: Sequence[Transfer], staging: Staging) -> Batch:
    """Keys and bytes of all blocks, after these were brought within reach. Both have been checked."""
    rooms = staging.rows([transfer for transfer in batch if transfer.on_device])
    keys: list[str] = []
    found: list[memoryview] = []
    for transfer in batch:
        blocks = transfer.blocks
        if transfer.on_device:
            views = _rows(rooms.pop(0))
            transfer.copies.to_host(blocks, views, transfer.after)
        elif blocks.starts is not None:
            views = _views(bytes_of_storage(blocks.tensor), blocks.starts, blocks.block_bytes)
        else:
            views = _rows(blocks.gather())
        keys += blocks.keys
        found += views
    return Batch(keys, found)


class _Target:
    """Where the blocks of one tensor are read: in place, or `beside` it, and from there into the tensor."""

    def __init__(self, transfer: Transfer, beside: "torch.Tensor | None") -> None:
        blocks = transfer.blocks
        self.transfer = transfer
        self.beside = beside
        if beside is None:
            assert blocks.starts is not None
            self._views = _views(bytes_of_storage(blocks.tensor), blocks.starts, blocks.block_bytes)
        else:
            self._views = _rows(beside)
        self.pairs = list(zip(blocks.keys, self._views, strict=True))

    def finish(self, lengths: Sequence[int | None]) -> _Problem:
        transfer = self.transfer
        problem = _find_problem(transfer.blocks, lengths)
        if problem is None and transfer.on_device:
            transfer.copies.to_device(self._views, transfer.blocks, transfer.after)
        elif problem is None and self.beside is not None:
            transfer.blocks.scatter(self.beside)
        return problem


def _targets(batch: Sequence[Transfer], staging: Staging) -> list[_Target]:
    rooms = staging.rows([transfer for transfer in batch if transfer.on_device])
    targets: list[_Target] = []
    for transfer in batch:
        beside: torch.Tensor | None = None
        if transfer.on_device:
            beside = rooms.pop(0)
        elif transfer.blocks.starts is None:
            beside = transfer.blocks.new_rows()
        targets.append(_Target(transfer, beside))
    return targets


def _finish(targets: list[_Target], lengths: Sequence[int | None]) -> list[_Problem]:
    parts = _parts([target.transfer for target in targets], lengths)
    return [target.finish(part) for target, part in zip(targets, parts, strict=True)]


def _problems(batch: Sequence[Transfer], lengths: Sequence[int | None]) -> list[_Problem]:
    parts = _parts(batch, lengths)
    return [_find_problem(transfer.blocks, part) for transfer, part in zip(batch, parts, strict=True)]


def _find_problem(blocks: TensorBlocks, lengths: Sequence[int | None]) -> _Problem:
    """Tell what is wrong with stored blocks of these lengths, None for one that is not there."""
    missing = [key for key, length in zip(blocks.keys, lengths, strict=True) if length is None]
    if missing:
        return BlocksMissing(missing, len(blocks.keys))
    for key, length in zip(blocks.keys, lengths, strict=True):
        if length != blocks.block_bytes:
            return BlockSizeMismatch(f"{key[:100]!r} has {length} bytes, and was to be read as {blocks.block_bytes}")
    return None


@contextmanager
def _longer_blocks_refused() -> Generator[None, None, None]:
    try:
        yield
    except BufferTooSmall as error:
        raise BlockSizeMismatch(str(error)) from error


def _parts(batch: Sequence[Transfer], items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """Cut a list with one item for each block into a part for each transfer."""
    first = 0
    for transfer in batch:
        count = len(transfer.blocks.keys)
        yield items[first : first + count]
        first += count


def _rows(rows: "torch.Tensor") -> list[memoryview]:
    return _views(rows.view(-1), range(0, rows.numel(), rows.shape[1]), rows.shape[1])


def _views(memory: "torch.Tensor", starts: Iterable[int], size: int) -> list[memoryview]:
    view: memoryview = memory.numpy().data
    return [view[start : start + size] for start in starts]
