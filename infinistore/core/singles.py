"""One block at a time, in one step: nothing is pinned or reserved, because nobody else
comes between.

A lease, a reservation and what they keep for the time until their end are most of what
a short block costs. A caller that has all of its bytes, or copies them before it calls
anything else, needs neither.

Leaves to others: batches, and whatever waits (`reads`, `writes`).
"""

from infinistore.core.clients import Client
from infinistore.core.hand_over import PoolParts
from infinistore.core.index import Entry
from infinistore.core.pins import HAZARDS_PER_BLOCK, HazardPins
from infinistore.core.space import Space
from infinistore.core.writes import Writes

__all__ = ["Singles"]


class Singles:
    """Reads and writes of one block each, which end before they return."""

    def __init__(
        self,
        parts: PoolParts,
        writes: Writes,
        space: Space,
        hazard_pins: HazardPins,
    ) -> None:
        self._pool = parts.pool
        self._committed = parts.committed
        self._retired = parts.retired
        self._removals = parts.removals
        self._holds = parts.holds
        self._reads = parts.reads
        self._writes = writes
        self._space = space
        self._hazard_pins = hazard_pins

    def find(self, client: Client, key: str) -> Entry | None:
        """Return the entry of a key, or None. This is no use of it: see `use`.

        Its bytes are to be copied at once: after the next call on the store they may be
        another block's. As nothing is pinned, this counts against no limit.
        """
        index = self._committed.up_to_date()
        client.check_open()
        unverified = self._reads.unverified
        if unverified is not None and unverified.verify(index, (key,)):
            return None  # it was damaged, and has been dropped
        return index.get(key)

    def use(self, client: Client, key: str, entry: Entry | None) -> None:
        """Touch a key that `find` has just found, and count a read of its block; None
        counts as a miss."""
        if entry is not None:
            self._committed.touch_one(key)
        self._reads.count(client, key, entry)

    def write(self, client: Client, key: str, value: memoryview, checksum: int, *, replace: bool = True) -> bool:
        """Store a block; False if the key exists and is not to be replaced.

        The space of a replaced block is free after `StoreCore.free_replaced`. Errors
        are those of `StoreCore.reserve`; after one, nothing has changed.
        """
        client.check_open()
        index = self._committed.up_to_date()
        if self._hazard_pins.clients:
            self._hazard_pins.scan_in_turns(client, HAZARDS_PER_BLOCK)
        self._holds.expire()
        sizes = [len(value)]
        footprint_bytes = self._writes.check(client, sizes)
        extents = self._space.reserve(index, sizes, footprint_bytes)
        self._space.reserved_bytes -= footprint_bytes
        entry = (*extents[0], checksum)
        try:
            self._pool.view(extents[0])[:] = value
            if replace:
                self._removals.replace(index, (key,), (entry,))
            elif index.get(key) is None:
                index.insert((key,), (entry,))
            else:
                index.touch_one(key)
        finally:
            stored = index.get(key) == entry
            if not stored:
                self._pool.free(extents)
        if stored:
            self._retired.note_stored((entry,))
            self._writes.count(client, (key,), (entry,))
        return stored
