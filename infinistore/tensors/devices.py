"""The blocks of a batch of tensors: which way suits which tensor, and the host memory
that blocks are copied from and to.

The copies of a tensor's device move its blocks, with staging memory, or an RDMA card
does without a copy. The latter is possible if the tensor is on a GPU and its memory is
registered with the store, RDMA is in use, and every block is contiguous. All other
blocks are copied by way of the host.
"""

import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary, finalize

import attrs

from infinistore.client import Registration
from infinistore.client.extension import Batch, DeviceBatch, DeviceMemory, in_thread
from infinistore.errors import BufferTooSmall
from infinistore.kept_errors import KeptError
from infinistore.sizes import in_units
from infinistore.tensors.copies import CudaCopies, MappedArena
from infinistore.tensors.cuda_runtime import TorchCuda, cuda_bindings
from infinistore.tensors.errors import BlockSizeMismatch, BlocksMissing
from infinistore.tensors.tensor_blocks import TensorBlocks, bytes_of_storage

if TYPE_CHECKING:
    import torch

    from infinistore.blocking import BlockingStore
    from infinistore.client import AsyncStore


_T = TypeVar("_T")


@attrs.frozen(eq=False)
class Transfer:
    """Blocks; for a tensor on a device, how they are copied, and after which event."""

    blocks: TensorBlocks
    copies: CudaCopies | None
    after: Any = None


def make_transfer(store: "BlockingStore | AsyncStore", blocks: TensorBlocks) -> Transfer:
    """Prepare to copy blocks. The thread that computes calls this.

    The copy waits for the work that this thread has queued so far.
    """
    copies = copies_for(store, blocks.tensor)
    return Transfer(blocks, copies, None if copies is None else copies.mark(blocks.tensor))


async def beside_loop(batch: Sequence[Transfer], work: Callable[[], _T]) -> _T:
    """Do work on these blocks, in a thread if it copies or asks a device.

    Other work takes less time than a thread.
    """
    if any(transfer.copies or transfer.blocks.starts is None for transfer in batch):
        return await in_thread(work)
    return work()


def pin_pool(store: "BlockingStore | AsyncStore", batch: Sequence[Transfer]) -> bool:
    """Pin the store's pool for the device of these tensors.

    Returns False if the pool is not mapped into this process.
    """
    arenas = [MappedArena(*arena) for arena in store.mapped_arenas()]
    copies, device = next((one.copies, one.blocks.tensor.device) for one in batch if one.copies)
    copies.use_pool(arenas, device)  # all devices of a store have the same copies
    return bool(arenas)


# The memory of a store's pool can be registered only once in a process, whoever copies
# from and to it.
_CUDA: "WeakKeyDictionary[BlockingStore | AsyncStore, CudaCopies]" = WeakKeyDictionary()
_cuda_lock = threading.Lock()


def _after_fork_in_child() -> None:
    # It may have been held by a thread that the child does not have.
    global _cuda_lock  # noqa: PLW0603
    _cuda_lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)


def copies_for(store: "BlockingStore | AsyncStore", tensor: "torch.Tensor") -> CudaCopies | None:
    """Return the copies for a tensor on a device, one a store; None on the CPU."""
    if tensor.is_cpu:
        return None
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

    def rows(self, batch: Sequence[Transfer]) -> "list[torch.Tensor | None]":
        """Return memory for the blocks of each transfer of a tensor on a device: uint8,
        one row for each block. Of others, None.

        It is valid until the next call.
        """
        total_bytes = max(1, sum(one.blocks.total_bytes for one in batch if one.copies))
        found: list[torch.Tensor | None] = []
        first = 0
        for transfer in batch:
            if transfer.copies is None:
                found.append(None)
                continue
            if self._memory is None or self._memory.numel() < total_bytes:
                self.close()
                self._memory = transfer.copies.host_memory(total_bytes)
                if self._store is not None:
                    self._registration = self._store.register(self._memory)
            blocks = transfer.blocks
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
        if transfer.copies is None or starts is None:
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


Problem: TypeAlias = KeptError | None
"""What was wrong with the blocks of one tensor."""


def copy_out(batch: Sequence[Transfer], views: Sequence[memoryview]) -> None:
    """Copy the blocks of all tensors into views of the pool."""
    for transfer, part in zip(batch, _parts(batch, views), strict=True):
        if transfer.copies is not None:
            transfer.copies.to_host(transfer.blocks, part, transfer.after)
        else:
            _copy(_contents(transfer.blocks), part)


def copy_in(batch: Sequence[Transfer], views: Sequence[memoryview | None]) -> list[Problem]:
    """Copy views of the pool into the blocks of all tensors; None is a missing one."""
    # In a function of its own: a view that a variable holds when the lease is left
    # counts as in use.
    found: list[Problem] = []
    for transfer, part in zip(batch, _parts(batch, views), strict=True):
        blocks, there = transfer.blocks, [view for view in part if view is not None]
        problem = _find_problem(blocks, [None if view is None else len(view) for view in part])
        if problem is None and transfer.copies is not None:
            transfer.copies.to_device(there, blocks, transfer.after)
        elif problem is None and blocks.starts is not None:
            _copy(there, _in_place(blocks))
        elif problem is None:
            rows = blocks.new_rows()
            _copy(there, _rows(rows))
            blocks.scatter(rows)
        found.append(problem)
    return found


def sources(batch: Sequence[Transfer], staging: Staging) -> Batch:
    """Return keys and bytes of all blocks, which have been checked.

    Blocks that this process cannot read in place are copied first.
    """
    found = Batch([], [])
    for transfer, rows in zip(batch, staging.rows(batch), strict=True):
        blocks = transfer.blocks
        if transfer.copies is not None and rows is not None:
            views = _rows(rows)
            transfer.copies.to_host(blocks, views, transfer.after)
        else:
            views = _contents(blocks)
        found.keys.extend(blocks.keys)
        found.views.extend(views)
    return found


class Target:
    """Where the blocks of one tensor are read to: in place, or into `beside` first."""

    def __init__(self, transfer: Transfer, beside: "torch.Tensor | None") -> None:
        self.transfer = transfer
        self.beside = beside
        self.views = _in_place(transfer.blocks) if beside is None else _rows(beside)

    def finish(self, lengths: Sequence[int | None]) -> Problem:
        """Copy the blocks that were read into the tensor, unless one is wrong."""
        transfer = self.transfer
        problem = _find_problem(transfer.blocks, lengths)
        if problem is None and transfer.copies is not None:
            transfer.copies.to_device(self.views, transfer.blocks, transfer.after)
        elif problem is None and self.beside is not None:
            transfer.blocks.scatter(self.beside)
        return problem


def targets(batch: Sequence[Transfer], staging: Staging) -> list[Target]:
    """Return where to read the blocks of each tensor."""
    found: list[Target] = []
    for transfer, rows in zip(batch, staging.rows(batch), strict=True):
        scattered = transfer.copies is None and transfer.blocks.starts is None
        found.append(Target(transfer, transfer.blocks.new_rows() if scattered else rows))
    return found


def batch_of(targets: list[Target]) -> Batch:
    """Return the keys of all targets, and where to read their blocks."""
    batch = Batch([], [])
    for target in targets:
        batch.keys.extend(target.transfer.blocks.keys)
        batch.views.extend(target.views)
    return batch


def finish(targets: list[Target], lengths: Sequence[int | None]) -> list[Problem]:
    """Finish each target. `lengths` are those of the stored blocks, None for a miss."""
    parts = _parts([target.transfer for target in targets], lengths)
    return [target.finish(part) for target, part in zip(targets, parts, strict=True)]


def problems(batch: Sequence[Transfer], lengths: Sequence[int | None]) -> list[Problem]:
    """Return what is wrong with each tensor's blocks, given their stored lengths."""
    parts = _parts(batch, lengths)
    return [_find_problem(transfer.blocks, part) for transfer, part in zip(batch, parts, strict=True)]


def _find_problem(blocks: TensorBlocks, lengths: Sequence[int | None]) -> Problem:
    """Tell what is wrong with stored blocks of these lengths; None is a miss."""
    missing = [key for key, length in zip(blocks.keys, lengths, strict=True) if length is None]
    if missing:
        return KeptError(BlocksMissing(missing, len(blocks.keys)))
    for key, length in zip(blocks.keys, lengths, strict=True):
        if length is not None and length != blocks.block_bytes:
            return KeptError(
                BlockSizeMismatch(
                    f"{key[:100]!r} has {in_units(length)}, and was to be read as {in_units(blocks.block_bytes)}"
                )
            )
    return None


@contextmanager
def longer_blocks_refused() -> Generator[None, None, None]:
    """Raise `BlockSizeMismatch` where the store raises `BufferTooSmall`."""
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


def _contents(blocks: TensorBlocks) -> list[memoryview]:
    """Return the blocks of a tensor on the CPU, in place if each is contiguous."""
    return _rows(blocks.gather()) if blocks.starts is None else _in_place(blocks)


def _in_place(blocks: TensorBlocks) -> list[memoryview]:
    assert blocks.starts is not None
    return _views(bytes_of_storage(blocks.tensor), blocks.starts, blocks.block_bytes)


def _copy(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target[:] = source


def _rows(rows: "torch.Tensor") -> list[memoryview]:
    return _views(rows.view(-1), range(0, rows.numel(), rows.shape[1]), rows.shape[1])


def _views(memory: "torch.Tensor", starts: Iterable[int], size: int) -> list[memoryview]:
    view: memoryview = memory.numpy().data
    return [view[start : start + size] for start in starts]
