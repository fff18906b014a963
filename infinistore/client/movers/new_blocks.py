"""Memory for blocks that are read into new objects.

New memory is not free: the kernel zeroes each page of it at the first touch, and takes
it back when a batch that is no longer wanted is freed. With 64 x 64 KiB over shared
memory that took three quarters of the processor time of a read. So the blocks of the
last batches are remembered, and those that nobody else refers to any more are given out
again.
"""

import sys
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from infinistore.protocol.messages import MISSING

KEPT_BYTES: Final = 16 * 1024 * 1024
"""How much memory is remembered at most."""
_LEAST_BYTES: Final = 64 * 1024
"""Shorter batches have memory that the allocator keeps at hand anyway."""


def _references(kept: deque[tuple[int, bytearray]]) -> int:
    """Return how many references there are to the first block, ours included.

    No variable has the block: a debugger that looks at variables would refer to it.
    """
    return sys.getrefcount(kept[0][1])


_NOBODY_ELSE: Final = 2
"""The references to a block that nobody else has: that of its tuple, and that of the
call that counts. It is not measured: what a debugger made too high at that moment would
give away blocks that one other has. Where it is another number, no block is used again.
"""
_counts_references: Final = (
    sys.implementation.name == "cpython"
    and getattr(sys, "_is_gil_enabled", lambda: True)()
    and _references(deque([(0, bytearray())])) == _NOBODY_ELSE
)


class NewBlocks:
    """Gives out blocks of new memory, or of memory that everybody has let go of. For
    one thread at a time.

    A view of a block refers to it, and so does whatever holds its buffer.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._most_bytes = kept_bytes if _counts_references else 0
        self._kept: deque[tuple[int, bytearray]] = deque()
        self.kept_bytes = 0
        """How much memory was given out and is remembered."""

    def of(self, sizes: Sequence[int]) -> Iterable[bytearray | None]:
        """Return a block of each of these sizes, in bytes, and None for `MISSING`. All
        that is in a block has to be overwritten before anybody sees it.
        """
        if MISSING in sizes:
            blocks = iter(self._of([size for size in sizes if size != MISSING]))
            return [None if size == MISSING else next(blocks) for size in sizes]
        return self._of(sizes)

    def _of(self, sizes: Sequence[int]) -> Iterable[bytearray]:
        if not sizes or sizes[0] * len(sizes) < _LEAST_BYTES:
            return map(bytearray, sizes)
        blocks = list(map(self._take, sizes))
        # In the order in which they will probably be let go of.
        self._kept += zip(sizes, blocks, strict=True)
        self.kept_bytes += sum(sizes)
        while self.kept_bytes > self._most_bytes:
            self._forget()
        return blocks

    def _take(self, size: int) -> bytearray:
        kept = self._kept
        if kept and kept[0][0] == size and _references(kept) == _NOBODY_ELSE:
            block = self._forget()
            if len(block) == size:  # its owner may have made it longer or shorter
                return block
        return bytearray(size)

    def _forget(self) -> bytearray:
        size, block = self._kept.popleft()
        self.kept_bytes -= size
        return block
