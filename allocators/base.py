"""The allocator interface: an allocator places blocks, and touches no memory.

An allocator knows arenas by index and length only. The pool maps its extents to bytes,
and the store decides what to evict when there is no space. `Allocator` is the contract
of every strategy; one test suite covers all of them. `infinistore.allocators.registry`
finds strategies by name.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar, TypeAlias

from infinistore.errors import ConfigError
from infinistore.statistics import AllocatorStatistics

__all__ = ["MINIMUM_UNIT_BYTES", "Allocator", "AllocatorStatistics", "Extent"]

Extent: TypeAlias = tuple[int, int, int]
"""The place of one block: (arena index, offset in bytes, requested length)."""

MINIMUM_UNIT_BYTES = 64
"""The smallest unit; every unit is a multiple of it.

It is a cache line, so that blocks never share one.
"""


class Allocator(ABC):
    """Places blocks in arenas. Not thread-safe: use one lock, or one task.

    The contract of every strategy:

    - Arenas are added and never removed. Before the first one, every batch is refused.
    - An extent lies in one arena, starts at a multiple of `unit_bytes`, and overlaps no
      other extent.
    - `allocate` returns one extent per size of a batch, in order, or refuses the whole
      batch and changes nothing. Sizes may be mixed.
    - A batch is contiguous if the strategy can arrange it: each block starts where the
      footprint of the previous block ends, so that the pool can move all of them as one
      span. This is a preference: a batch is never refused because it would be split
      into several pieces.
    - A block takes `footprint(size)` bytes, which `used_bytes` counts exactly. When
      everything is freed, every byte of capacity can be allocated again.
    - A refusal is cheap (tens of microseconds), because a full store gets one for most
      batches.
    - Freeing an extent that is not allocated (already freed, or never allocated) raises
      `ValueError`.

    A strategy is created with `unit_bytes`, the server's `minimal_allocate_size`.
    Subclasses set `name`, and are named by an entry point in the group
    `infinistore.allocators`.
    """

    name: ClassVar[str]
    """The name for `--allocator` and in the statistics."""

    def __init__(self, unit_bytes: int) -> None:
        if unit_bytes < MINIMUM_UNIT_BYTES or unit_bytes % MINIMUM_UNIT_BYTES:
            raise ConfigError(
                f"the smallest allocation must be a multiple of {MINIMUM_UNIT_BYTES} bytes, got {unit_bytes}"
            )
        self.unit_bytes = unit_bytes
        self._arena_bytes: list[int] = []
        """The length of each arena."""

    def record_arena(self, index: int, length: int) -> None:
        """Record an arena that a subclass adds, or raise ValueError."""
        arenas = len(self._arena_bytes)
        if index != arenas or length < 0:
            raise ValueError(f"arena {arenas} is next, of zero bytes or more; got arena {index} of {length} bytes")
        self._arena_bytes.append(length)

    @classmethod
    def prepare_process(cls) -> None:
        """Prepare this process for the strategy, or raise `ConfigError`.

        It runs before any thread, socket or file exists, because a strategy may
        re-execute the process with another environment. Most strategies do nothing.
        """
        return

    @abstractmethod
    def add_arena(self, index: int, length: int) -> None:
        """Add the arena `index` of `length` bytes.

        Indices are 0, 1, 2, ... in the order of the calls. A rest at the end that is
        shorter than a unit is not used. Raises `ValueError` for an index out of order
        or a negative length.
        """

    @abstractmethod
    def allocate(self, sizes: Sequence[int]) -> list[Extent] | None:
        """Return one extent per size in bytes, in order, or None.

        None means that the batch cannot be placed and nothing has changed. Raises
        `ValueError` for a size of zero or less. A size larger than the pool is refused
        with None.
        """

    @abstractmethod
    def free(self, extents: Iterable[Extent]) -> None:
        """Free these extents, in any order and any grouping.

        Raises `ValueError` and changes nothing if one of them is not allocated: already
        freed, listed twice in this call, or not an extent of this allocator. A wrong
        length with the same footprint is not detected and harmless.
        """

    def adopt(self, extents: Sequence[Extent]) -> list[bool]:
        """Take extents that an allocator of an earlier process handed out, in arenas
        of these lengths.

        Returns for each whether it is taken now, as if `allocate` had placed it. It is
        not if it is no place of this strategy, or not free. The default is for a
        strategy that cannot take a place that it has not chosen: none is taken.
        """
        return [False] * len(extents)

    @abstractmethod
    def footprint(self, size: int) -> int:
        """Return the bytes that a block of `size` bytes takes: whole units."""

    @abstractmethod
    def statistics(self) -> AllocatorStatistics:
        """Return the current statistics."""

    def occupied_bytes(self, index: int, parts: int) -> list[int]:
        """Return the used bytes in each of `parts` equal parts of an arena, in order.

        Monitors use it to show where the pool is full. The default spreads `used_bytes`
        evenly over all arenas; a strategy with better information overrides it.
        """
        held = self.statistics()
        taken = held.used_bytes * self._arena_bytes[index] // max(1, sum(self._arena_bytes))
        return [taken * (part + 1) // parts - taken * part // parts for part in range(parts)]
