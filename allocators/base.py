"""What an allocator is: it decides where blocks live, and touches no memory.

An allocator knows arenas only as an index and a length; the pool maps its extents to bytes, and the store decides
what to evict when there is no room. `Allocator` is the contract that every strategy keeps, and the same tests hold all
of them to it. Strategies are found by name in `infinistore.allocators.registry`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar, TypeAlias

import attrs

from infinistore.errors import ConfigError

__all__ = ["MINIMUM_UNIT_BYTES", "Allocator", "AllocatorStatistics", "Extent"]

Extent: TypeAlias = tuple[int, int, int]
"""Where one block lives: (arena index, offset in bytes, length in bytes as asked for)."""

MINIMUM_UNIT_BYTES = 64
"""The smallest unit, and what every unit is a multiple of: a cache line, so that blocks never share one."""


@attrs.frozen(kw_only=True)
class AllocatorStatistics:
    """What an allocator holds at one moment. All sizes in bytes."""

    name: str
    """The strategy's name."""
    unit_bytes: int
    """Every offset is a multiple of this."""
    arenas: int
    """How many arenas were added."""
    capacity_bytes: int
    """What blocks can take at most: the arenas' lengths, less the tail of each that is too short to use."""
    used_bytes: int
    """The sum of the footprints of all allocated extents."""
    extents: int
    """How many extents are allocated."""
    largest_free_extent_bytes: int
    """The size of the largest block that could be placed right now, exact: a block of this many bytes is not refused,
    and one byte more is."""

    @property
    def free_bytes(self) -> int:
        """Capacity less what is used. A block of this size fits only if the free room is in one piece."""
        return self.capacity_bytes - self.used_bytes


class Allocator(ABC):
    """Places blocks in arenas. Not thread-safe: its owner calls it under one lock, or from one task.

    The contract, for every strategy:

    - Arenas are added and never removed. Before the first one, every batch is refused.
    - An extent lies in one arena, starts at a multiple of `unit_bytes`, and overlaps no other extent.
    - `allocate` gives a batch one extent per size, in order, or refuses it whole and changes nothing. Sizes may be
      mixed.
    - A batch lies in one piece where the strategy can arrange it: each block then starts where the footprint of the
      block before it ends, so that the pool can move them all as one span. It is a preference: a batch is never refused
      because it would lie in several pieces.
    - A block takes `footprint(size)` bytes, which is what `used_bytes` counts, exactly. When everything is freed, every
      byte of capacity can be allocated again.
    - A refusal is cheap (tens of microseconds), because a full store meets one for nearly every batch it takes.
    - An extent that is not allocated (freed before, or never given out) is refused with a `ValueError`.

    A strategy is made with `unit_bytes`, which is the server's `minimal_allocate_size`. Subclasses set `name`, and are
    named by an entry point in the group `infinistore.allocators`.
    """

    name: ClassVar[str]
    """The name in `--allocator` and in the statistics."""

    def __init__(self, unit_bytes: int) -> None:
        if unit_bytes < MINIMUM_UNIT_BYTES or unit_bytes % MINIMUM_UNIT_BYTES:
            raise ConfigError(
                f"the smallest allocation must be a multiple of {MINIMUM_UNIT_BYTES} bytes, got {unit_bytes}"
            )
        self.unit_bytes = unit_bytes
        self._arena_bytes: list[int] = []
        """The length of each arena."""

    def _check_arena(self, index: int, length: int) -> None:
        """Count an arena that a subclass is about to add; ValueError if it is out of turn or has no sense."""
        arenas = len(self._arena_bytes)
        if index != arenas or length < 0:
            raise ValueError(f"arena {arenas} is next, of zero bytes or more; got arena {index} of {length} bytes")
        self._arena_bytes.append(length)

    @classmethod
    def prepare_process(cls) -> None:
        """Do what the strategy needs done to this process before the server starts, or raise `ConfigError`.

        A strategy may replace the process by itself with another environment, so this is called before any thread,
        socket or file exists. Most need nothing, and do nothing.
        """
        return

    @abstractmethod
    def add_arena(self, index: int, length: int) -> None:
        """Add the arena `index`, of `length` bytes, to what can be allocated.

        Indices are 0, 1, 2, ... in the order of the calls. Room at the end that is shorter than a unit is not used.
        Raises `ValueError` for an index out of turn or a length below zero.
        """

    @abstractmethod
    def allocate(self, sizes: Sequence[int]) -> list[Extent] | None:
        """Return one extent per size in bytes, in order, or None when the batch cannot be placed (nothing has changed).

        Raises `ValueError` for a size of zero or less. A size larger than the pool is refused like any other.
        """

    @abstractmethod
    def free(self, extents: Iterable[Extent]) -> None:
        """Give the room of these extents back, in any order and any grouping.

        Raises `ValueError`, and changes nothing, if one of them is not allocated: freed before, twice in this call, or
        not an extent of this allocator. A wrong length with the same footprint is not noticed; it does no harm.
        """

    @abstractmethod
    def footprint(self, size: int) -> int:
        """Return how many bytes of the pool a block of `size` bytes takes: whole units, so `size` or more."""

    @abstractmethod
    def statistics(self) -> AllocatorStatistics:
        """Return what is held now."""

    def occupied_bytes(self, index: int, parts: int) -> list[int]:
        """Return how many bytes are taken in each of `parts` equal parts of an arena, first to last.

        It is for people who look at how full the pool is, and where. A strategy that knows better replaces this, which
        spreads `used_bytes` evenly over all arenas.
        """
        held = self.statistics()
        taken = held.used_bytes * self._arena_bytes[index] // max(1, sum(self._arena_bytes))
        return [taken * (part + 1) // parts - taken * part // parts for part in range(parts)]
