"""Retired blocks: they have lost their keys, and their space is not free yet.

Clients may set hazards in shared memory (see `hazard_pins`). They have to be scanned
between the moment when a removal is announced (`on_removal` of the store) and the
moment when the space is used again. The number of hazards is bounded, but not how often
clients change them. So a removal does not scan on its own: retired blocks *wait* until
there are enough of them to pay for the scan, or until their space is needed. Usually
there is little to scan, and they wait for nothing. So the cost of a removal does not
depend on what clients write.

After the scan, a block that is pinned is *condemned*: it keeps its space until its last
pin ends, and then waits again.
"""

from collections.abc import Callable, Iterable, Sequence

from infinistore.core.index import Entry, extent_of, length_of
from infinistore.core.pins import PinTable
from infinistore.core.pool import Pool

__all__ = ["HAZARDS_PER_BLOCK", "MOST_WAITING_RATIO", "Retired"]

HAZARDS_PER_BLOCK = 16
"""How many hazards may be read for each block that has lost its key: about 20 us."""
MOST_WAITING_RATIO = 1 / 32
"""The part of the pool that may wait although it could be freed."""
_MOST_UNREAD = 16 * 1024
_MOST_UNREAD_EACH = 512


class Retired:
    """The blocks of one pool that have no key any more, and how they are freed."""

    def __init__(self, pool: Pool, pins: PinTable) -> None:
        self.stored: set[Entry] | None = None
        """Blocks that were committed and still have their space; None where no client
        sets hazards."""
        self.condemned: set[Entry] = set()
        """Blocks that are pinned but have no key any more."""
        self.scan_hazards: Callable[[int | None], object] = _nothing
        """Updates the pins that hazards stand for; with a number, of those clients only
        that have at most so many hazards to read."""
        self.unread_hazards: Callable[[int], int] = _none
        """Returns about how many hazards that would read, or more than the number
        given; 0 if it would change nothing."""
        self._pool = pool
        self._pins = pins
        self._waiting: list[Entry] = []
        self._counted = self._counted_bytes = 0  # of those that wait: how many have been counted, and their footprints

    @property
    def waiting_bytes(self) -> int:
        """The footprints of the blocks that wait, counted when this is read: usually
        they are freed before."""
        if self._counted < len(self._waiting):
            self._counted_bytes += self._pool.footprints(list(map(length_of, self._waiting[self._counted :])))
            self._counted = len(self._waiting)
        return self._counted_bytes

    def expect_hazards(self, entries: Iterable[Entry]) -> None:
        """Get ready for clients that set hazards; `entries` are the blocks that have
        keys."""
        self.stored = {*entries, *self.condemned, *self._waiting}

    def note_stored(self, entries: Iterable[Entry]) -> None:
        """Note blocks that have just been committed."""
        if self.stored is not None:
            self.stored.update(entries)

    def scan_for(self, entries: Sequence[Entry]) -> bool:
        """Scan all hazards before these blocks are added, unless that is too much for
        so few.

        Returns whether it was done. Only this calls others, and may fail; `add` does
        not.
        """
        if self.stored is None:
            return True
        most = HAZARDS_PER_BLOCK * (1 + len(self._waiting) + len(entries))
        unread = self.unread_hazards(most)
        if unread > most and self.waiting_bytes <= MOST_WAITING_RATIO * self._pool.capacity_bytes:
            return False
        if unread:
            self.scan_hazards(None)
        return True

    def add(self, entries: Sequence[Entry], *, scanned: bool) -> None:
        """Free blocks, now or with their last pin, if hazards were `scanned` after
        their removal was announced.

        Otherwise they wait for `tidy`.
        """
        if scanned and not self._waiting:  # the usual case
            self._free(entries)
            return
        self._waiting += entries
        if scanned:
            self._free_waiting()

    def unpin(self, entries: Sequence[Entry], footprint_bytes: int) -> None:
        """Take one pin from each block; condemned blocks that have none left are freed
        soon."""
        if self.take_pins(entries, footprint_bytes):
            self.tidy()

    def take_pins(self, entries: Sequence[Entry], footprint_bytes: int) -> bool:
        """As `unpin`, for callers that call `tidy` afterwards. Returns whether they
        have to."""
        ended = self._pins.remove(entries, footprint_bytes)
        if not self.condemned or self.condemned.isdisjoint(ended):
            return False
        gone = [entry for entry in ended if entry in self.condemned]
        self.condemned.difference_update(gone)
        self._waiting += gone
        return True

    def scan_some(self) -> None:
        """Scan all hazards, or most of them if all would take much longer than to evict
        the next blocks."""
        unread = self.unread_hazards(_MOST_UNREAD)
        if unread:
            self.scan_hazards(None if unread <= _MOST_UNREAD else _MOST_UNREAD_EACH)

    def tidy(self) -> None:
        """Free the blocks that wait, unless there is too much to scan for so few of
        them."""
        if self._waiting and self.scan_for(()):
            self._free_waiting()

    def reclaim(self) -> None:
        """Scan all hazards, and free the blocks that wait: now, or with their last
        pin."""
        if self.unread_hazards(0):
            self.scan_hazards(None)
        self._free_waiting()

    def _free_waiting(self) -> None:
        # All of them were announced before the scan began: those that came during it
        # were condemned.
        if self._waiting:
            entries, self._waiting = self._waiting, []
            self._counted = self._counted_bytes = 0
            self._free(entries)

    def _free(self, entries: Sequence[Entry]) -> None:
        pinned = self._pins.counts
        if pinned and not pinned.keys().isdisjoint(entries):
            self.condemned.update(entry for entry in entries if entry in pinned)
            entries = [entry for entry in entries if entry not in pinned]
        self._pool.free(list(map(extent_of, entries)))
        if self.stored is not None:
            self.stored.difference_update(entries)


def _nothing(most_unread: int | None) -> None:
    """Update nothing: no client sets hazards."""


def _none(most: int) -> int:
    return 0
