"""The host memory that the blocks of a batch of tensors are copied from and to."""

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from infinistore.client.extension import Batch
from infinistore.errors import BufferTooSmall
from infinistore.kept_errors import KeptError
from infinistore.sizes import in_units
from infinistore.tensors.devices import Staging, Transfer
from infinistore.tensors.errors import BlockSizeMismatch, BlocksMissing
from infinistore.tensors.tensor_blocks import TensorBlocks, bytes_of_storage

if TYPE_CHECKING:
    import torch

_T = TypeVar("_T")
Problem: TypeAlias = KeptError | None
"""What was wrong with the blocks of one tensor."""


def copy_out(batch: Sequence[Transfer], views: Sequence[memoryview]) -> None:
    """Copy the blocks of devices into views of the pool."""
    for transfer, part in zip(batch, _parts(batch, views), strict=True):
        transfer.copies.to_host(transfer.blocks, part, transfer.after)


def copy_in(batch: Sequence[Transfer], views: Sequence[memoryview | None]) -> list[Problem]:
    """Copy views of the pool into the blocks of devices; None is a missing block."""
    # In a function of its own: a view that a variable holds when the lease is left
    # counts as in use.
    found: list[Problem] = []
    for transfer, part in zip(batch, _parts(batch, views), strict=True):
        problem = _find_problem(transfer.blocks, [None if view is None else len(view) for view in part])
        if problem is None:
            transfer.copies.to_device([view for view in part if view is not None], transfer.blocks, transfer.after)
        found.append(problem)
    return found


def sources(batch: Sequence[Transfer], staging: Staging) -> Batch:
    """Return keys and bytes of all blocks, which have been checked.

    Blocks that this process cannot read in place are copied first.
    """
    rows = staging.rows([transfer for transfer in batch if transfer.on_device])
    keys: list[str] = []
    found: list[memoryview] = []
    for transfer in batch:
        blocks = transfer.blocks
        if transfer.on_device:
            views = _rows(rows.pop(0))
            transfer.copies.to_host(blocks, views, transfer.after)
        elif blocks.starts is not None:
            views = _views(bytes_of_storage(blocks.tensor), blocks.starts, blocks.block_bytes)
        else:
            views = _rows(blocks.gather())
        keys += blocks.keys
        found += views
    return Batch(keys, found)


class Target:
    """Where the blocks of one tensor are read to: in place, or into `beside` first."""

    def __init__(self, transfer: Transfer, beside: "torch.Tensor | None") -> None:
        blocks = transfer.blocks
        self.transfer = transfer
        self.beside = beside
        if beside is None:
            assert blocks.starts is not None
            self.views = _views(bytes_of_storage(blocks.tensor), blocks.starts, blocks.block_bytes)
        else:
            self.views = _rows(beside)

    def finish(self, lengths: Sequence[int | None]) -> Problem:
        """Copy what was read into the tensor, unless something is wrong with it."""
        transfer = self.transfer
        problem = _find_problem(transfer.blocks, lengths)
        if problem is None and transfer.on_device:
            transfer.copies.to_device(self.views, transfer.blocks, transfer.after)
        elif problem is None and self.beside is not None:
            transfer.blocks.scatter(self.beside)
        return problem


def targets(batch: Sequence[Transfer], staging: Staging) -> list[Target]:
    """Return where to read the blocks of each tensor."""
    rows = staging.rows([transfer for transfer in batch if transfer.on_device])
    found: list[Target] = []
    for transfer in batch:
        beside: torch.Tensor | None = None
        if transfer.on_device:
            beside = rows.pop(0)
        elif transfer.blocks.starts is None:
            beside = transfer.blocks.new_rows()
        found.append(Target(transfer, beside))
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


def _rows(rows: "torch.Tensor") -> list[memoryview]:
    return _views(rows.view(-1), range(0, rows.numel(), rows.shape[1]), rows.shape[1])


def _views(memory: "torch.Tensor", starts: Iterable[int], size: int) -> list[memoryview]:
    view: memoryview = memory.numpy().data
    return [view[start : start + size] for start in starts]
