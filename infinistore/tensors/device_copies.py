"""Copies of blocks between a tensor and host memory: the interface, and the CPU's.

Adjacent blocks are merged, so that the cost of a copy depends on the number of pieces
of memory, not on the number of blocks.
"""

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from infinistore.tensors.tensor_blocks import TensorBlocks

if TYPE_CHECKING:
    import torch

__all__ = ["CpuCopies", "DeviceCopies", "Pieces", "addresses_of", "merge"]

_Numbers = NDArray[np.int64]


class DeviceCopies(Protocol):
    """Copies between tensors on one kind of device and the memory of this process.

    Any thread may call.
    """

    def mark(self, tensor: "torch.Tensor") -> Any:
        """Return an event after the earlier work of the device on the tensor.

        Called by the thread that computes.
        """

    def to_host(self, blocks: TensorBlocks, targets: Sequence[memoryview], after: Any) -> None:
        """Copy the blocks into memory, one target for each, after the event `after`.

        When this returns or raises, nobody reads the tensor or writes to the targets
        any more.
        """

    def to_device(self, sources: Sequence[memoryview], blocks: TensorBlocks, after: Any) -> None:
        """Copy memory into the blocks, one source for each, after the event `after`.

        When this returns or raises, nobody reads the sources or writes to the tensor
        any more.
        """

    def host_memory(self, length: int) -> "torch.Tensor":
        """Allocate host memory that suits the device: uint8, `length` bytes."""


class Pieces(NamedTuple):
    """Pieces of memory to copy: starts on both sides, and lengths, in bytes."""

    here: list[int]
    there: list[int]
    sizes: list[int]


def merge(here: _Numbers, there: _Numbers, size: int, boundaries: Sequence[int] = ()) -> Pieces:
    """Merge blocks of `size` bytes that are adjacent on both sides.

    Never merges across a boundary `there`.
    """
    if not len(here):
        return Pieces([], [], [])
    apart = (np.diff(here) != size) | (np.diff(there) != size)
    if boundaries:
        apart |= np.diff(np.searchsorted(np.array(sorted(boundaries)), there, side="right")) != 0
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    counts = np.diff(np.concatenate((first, [len(here)])))
    return Pieces(here[first].tolist(), there[first].tolist(), (counts * size).tolist())


def addresses_of(views: Sequence[memoryview]) -> _Numbers:
    """Return the address of each view. It does not keep the views alive."""
    found = [np.frombuffer(view, np.uint8).__array_interface__["data"][0] for view in views]
    return np.array(found, np.int64)


class CpuCopies:
    """Tensors on the CPU. The interpreter's lock is free while bytes are copied."""

    def mark(self, tensor: "torch.Tensor") -> None:
        """The CPU has done what it was told."""

    def to_host(self, blocks: TensorBlocks, targets: Sequence[memoryview], after: None = None) -> None:
        """Copy the blocks into memory."""
        tensor, starts = (blocks.tensor, blocks.starts) if blocks.starts is not None else _gathered(blocks)
        _move(addresses_of(targets), _addresses_in(tensor, starts), blocks.block_bytes)

    def to_device(self, sources: Sequence[memoryview], blocks: TensorBlocks, after: None = None) -> None:
        """Copy memory into the blocks."""
        if blocks.starts is not None:
            _move(_addresses_in(blocks.tensor, blocks.starts), addresses_of(sources), blocks.block_bytes)
            return
        rows = blocks.new_rows()
        _move(_addresses_in(rows, _row_starts(blocks)), addresses_of(sources), blocks.block_bytes)
        blocks.scatter(rows)

    def host_memory(self, length: int) -> "torch.Tensor":
        """Make memory."""
        import torch

        return torch.empty(length, dtype=torch.uint8, device="cpu")


def _gathered(blocks: TensorBlocks) -> "tuple[torch.Tensor, Sequence[int]]":
    return blocks.gather(), _row_starts(blocks)


def _row_starts(blocks: TensorBlocks) -> Sequence[int]:
    return range(0, blocks.total_bytes, blocks.block_bytes)


def _addresses_in(tensor: "torch.Tensor", starts: Sequence[int]) -> _Numbers:
    return np.array(starts, np.int64) + tensor.untyped_storage().data_ptr()


def _move(targets: _Numbers, sources: _Numbers, size: int) -> None:
    for target, source, count in zip(*merge(targets, sources, size), strict=True):
        ctypes.memmove(target, source, count)
