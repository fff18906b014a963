"""How often each block is pinned, and how many bytes that is.

A pin says: somebody reads here; do not move, free or re-use these bytes. Several
readers may pin one block, so pins are counted. `bytes` counts each pinned block once,
by footprint.

Leaves to others: what happens to a block whose last pin ended (the store).
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat

from infinistore.core.index import Entry, length_of

__all__ = ["PinTable"]


class PinTable:
    """The number of pins of each entry.

    `footprint(size_bytes)` returns what a block of that size takes of the pool.
    """

    __slots__ = ("_footprint", "bytes", "counts")

    def __init__(self, footprint: Callable[[int], int]) -> None:
        self._footprint = footprint
        self.counts: dict[Entry, int] = {}
        """Entry to number of pins, at least 1. Read it; change it only through `add`
        and `remove`."""
        self.bytes = 0
        """The footprints of all pinned blocks, each counted once."""

    def footprint(self, entries: Iterable[Entry]) -> int:
        """Return what entries take of the pool, in bytes; duplicates count twice."""
        lengths = list(map(length_of, entries))
        if lengths and lengths.count(lengths[0]) == len(lengths):  # the usual case
            return self._footprint(lengths[0]) * len(lengths)
        return sum(map(self._footprint, lengths))

    def add(self, entries: Sequence[Entry], footprint_bytes: int) -> None:
        """Pin each entry once more; duplicates get two pins.

        `footprint_bytes` is `footprint(entries)`.
        """
        counts = self.counts
        # Usually no block is pinned yet; then this runs at C speed.
        first = dict.fromkeys(entries, 1)
        if len(first) == len(entries) and (not counts or counts.keys().isdisjoint(first)):
            counts.update(first)
            self.bytes += footprint_bytes
        else:
            self.bytes += self.footprint(self._add_singly(entries))

    def _add_singly(self, entries: Sequence[Entry]) -> dict[Entry, int]:
        """Pin entries one by one; return those that had no pin."""
        counts = self.counts
        first: dict[Entry, int] = {}
        for entry in entries:
            if entry in counts:
                counts[entry] += 1
            else:
                counts[entry] = first[entry] = 1
        return first

    def remove(self, entries: Sequence[Entry], footprint_bytes: int) -> Sequence[Entry]:
        """Take one pin from each entry, and return those that have none left.

        `footprint_bytes` is `footprint(entries)`, as for `add`.
        """
        counts = self.counts
        # Usually each block is pinned once. Taking all pins out at C speed finds
        # that out and is done.
        taken = list(map(counts.pop, entries, repeat(0)))
        if taken.count(1) == len(taken):
            self.bytes -= footprint_bytes
            return entries
        counts.update((entry, count) for entry, count in zip(entries, taken, strict=True) if count)
        ended = self._remove_singly(entries)
        self.bytes -= self.footprint(ended)
        return ended

    def _remove_singly(self, entries: Sequence[Entry]) -> list[Entry]:
        counts = self.counts
        ended: list[Entry] = []
        for entry in entries:
            count = counts[entry] - 1
            if count:
                counts[entry] = count
            else:
                del counts[entry]
                ended.append(entry)
        return ended

    def added_bytes(self, entries: Sequence[Entry]) -> int:
        """Return by how much `bytes` would grow if these entries were pinned too."""
        return self.footprint(set(entries).difference(self.counts))
