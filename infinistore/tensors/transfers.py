"""Blocks of tensors put into a store and read from one: several tensors' blocks in one batch."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

from infinistore.errors import BufferTooSmall, InfiniStoreException
from infinistore.tensors.errors import BlockSizeMismatch, BlocksMissing
from infinistore.tensors.tensor_blocks import TensorBlocks, bytes_of_storage

if TYPE_CHECKING:
    import torch

    from infinistore.blocking import BlockingStore
    from infinistore.client import AsyncStore

__all__ = ["get_blocks", "get_blocks_async", "put_blocks", "put_blocks_async"]

_Pairs: TypeAlias = list[tuple[str, memoryview]]


def put_blocks(store: "BlockingStore", batch: Sequence[TensorBlocks]) -> None:
    """Store the blocks of all these tensors, visible at once."""
    store.put_many(_sources(batch))


async def put_blocks_async(store: "AsyncStore", batch: Sequence[TensorBlocks]) -> None:
    """The same for an asynchronous store."""
    await store.put_many(_sources(batch))


def get_blocks(store: "BlockingStore", batch: Sequence[TensorBlocks]) -> list[InfiniStoreException | None]:
    """Read the blocks of all these tensors; return for each tensor None, or what was wrong with its blocks.

    Raises:
        BlockSizeMismatch: a stored block is longer than its place in a tensor; nothing was written to any.
    """
    targets = list(map(_Target, batch))
    with _longer_blocks_refused():
        lengths = store.get_many_into(pair for target in targets for pair in target.pairs)
    return _finish(targets, lengths)


async def get_blocks_async(store: "AsyncStore", batch: Sequence[TensorBlocks]) -> list[InfiniStoreException | None]:
    """The same for an asynchronous store."""
    targets = list(map(_Target, batch))
    with _longer_blocks_refused():
        lengths = await store.get_many_into(pair for target in targets for pair in target.pairs)
    return _finish(targets, lengths)


def _sources(batch: Sequence[TensorBlocks]) -> _Pairs:
    pairs: _Pairs = []
    for blocks in batch:
        if blocks.starts is not None:
            views = _views(bytes_of_storage(blocks.tensor), blocks.starts, blocks.block_bytes)
        else:
            views = _rows(blocks.gather(), blocks)
        pairs += zip(blocks.keys, views, strict=True)
    return pairs


class _Target:
    """Where the blocks of one tensor are read: in place, or beside it, and from there into the tensor."""

    def __init__(self, blocks: TensorBlocks) -> None:
        import torch

        self._blocks = blocks
        self._beside: torch.Tensor | None = None
        if blocks.starts is not None:
            views = _views(bytes_of_storage(blocks.tensor), blocks.starts, blocks.block_bytes)
        else:
            self._beside = torch.empty((len(blocks.keys), blocks.block_bytes), dtype=torch.uint8)
            views = _rows(self._beside, blocks)
        self.pairs = list(zip(blocks.keys, views, strict=True))

    def finish(self, lengths: Sequence[int | None]) -> InfiniStoreException | None:
        keys, size = self._blocks.keys, self._blocks.block_bytes
        missing = [key for key, length in zip(keys, lengths, strict=True) if length is None]
        if missing:
            return BlocksMissing(missing, len(keys))
        for key, length in zip(keys, lengths, strict=True):
            if length != size:
                return BlockSizeMismatch(f"{key[:100]!r} has {length} bytes, and was to be read as {size}")
        if self._beside is not None:
            self._blocks.scatter(self._beside)
        return None


def _finish(targets: list[_Target], lengths: list[int | None]) -> list[InfiniStoreException | None]:
    first = 0
    found: list[InfiniStoreException | None] = []
    for target in targets:
        found.append(target.finish(lengths[first : first + len(target.pairs)]))
        first += len(target.pairs)
    return found


@contextmanager
def _longer_blocks_refused() -> Generator[None, None, None]:
    try:
        yield
    except BufferTooSmall as error:
        raise BlockSizeMismatch(str(error)) from error


def _rows(rows: "torch.Tensor", blocks: TensorBlocks) -> list[memoryview]:
    return _views(rows.view(-1), range(0, blocks.total_bytes, blocks.block_bytes), blocks.block_bytes)


def _views(memory: "torch.Tensor", starts: Iterable[int], size: int) -> list[memoryview]:
    view: memoryview = memory.numpy().data
    return [view[start : start + size] for start in starts]
