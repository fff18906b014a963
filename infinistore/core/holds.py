"""Holds: pins that outlive their connection, and expire.

A scheduler matches a prefix in one process, and another process reads it a moment
later. In between, a hold keeps the matched blocks from being evicted. It ends when it
is released, by anyone who knows its id, or when its time is over.
"""

import heapq
import random
from collections.abc import Callable

from infinistore.core.index import Entry
from infinistore.core.limits import CoreLimits
from infinistore.core.pins import PinTable
from infinistore.core.pool import Pool
from infinistore.core.retired import Retired
from infinistore.errors import LimitExceeded

__all__ = ["Holds"]


class Holds:
    """The open holds of a store, by id. Their ids come from `random`: 64 bits, so that
    nobody guesses one if that is the system's generator.

    `pins` are those of all readers together. Blocks whose last pin ends go back to
    `retired`.
    """

    def __init__(
        self,
        pool: Pool,
        pins: PinTable,
        retired: Retired,
        limits: CoreLimits,
        *,
        clock: Callable[[], float],
        random: random.Random,
    ) -> None:
        self._pool = pool
        self._pins = pins
        self._own = PinTable(pool.footprint)  # by holds alone
        self._retired = retired
        self._limits = limits
        self._clock = clock
        self._random = random
        self._entries: dict[int, list[Entry]] = {}
        self._ends: list[tuple[float, int]] = []  # a heap; ids released early stay in it until their time

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes(self) -> int:
        """The footprints of all blocks that are held, each counted once."""
        return self._own.bytes

    def check_time(self, hold_s: float) -> None:
        """Raise ValueError or LimitExceeded unless a hold may last `hold_s` seconds."""
        if not hold_s > 0:
            raise ValueError(f"hold_s must be more than 0 seconds, not {hold_s}")
        most_s = self._limits.max_hold_s
        if hold_s > most_s:
            raise LimitExceeded(f"hold_s={hold_s:g} is above the limit max_hold_s={most_s:g} seconds")

    def add(self, entries: list[Entry], hold_s: float) -> int:
        """Pin blocks for `hold_s` seconds; return the id of the hold, 1 to 2**64 - 1.

        LimitExceeded: all holds together would pin too much.
        """
        held_bytes = self._own.bytes + self._own.added_bytes(entries)
        footprint_bytes = self._pins.footprint(entries)
        self._limits.check_held(held_bytes, footprint_bytes, self._pool.capacity_bytes)
        self._pins.add(entries, footprint_bytes)
        self._own.add(entries, footprint_bytes)
        hold_id = 0
        while not hold_id or hold_id in self._entries:
            hold_id = self._random.getrandbits(64)
        self._keep(hold_id, entries, self._clock() + hold_s)
        return hold_id

    def export(self) -> list[tuple[int, float, list[Entry]]]:
        """Return (id, seconds left, entries) of each hold, for another process."""
        ends = {hold_id: end for end, hold_id in self._ends}
        now = self._clock()
        return [(hold_id, max(0.0, ends[hold_id] - now), entries) for hold_id, entries in self._entries.items()]

    def adopt(self, hold_id: int, entries: list[Entry], left_s: float) -> None:
        """Go on with a hold of another process."""
        footprint_bytes = self._pins.footprint(entries)
        self._pins.add(entries, footprint_bytes)
        self._own.add(entries, footprint_bytes)
        self._keep(hold_id, entries, self._clock() + min(left_s, self._limits.max_hold_s))

    def _keep(self, hold_id: int, entries: list[Entry], end: float) -> None:
        self._entries[hold_id] = entries
        if len(self._ends) > 2 * len(self._entries) + 64:  # mostly released early: forget those
            self._ends = [(end, hold) for end, hold in self._ends if hold in self._entries]
            heapq.heapify(self._ends)
        heapq.heappush(self._ends, (end, hold_id))

    def release(self, hold_id: int) -> bool:
        """End a hold; False if there is none of this id."""
        entries = self._entries.pop(hold_id, None)
        if entries is None:
            return False
        footprint_bytes = self._pins.footprint(entries)
        self._own.remove(entries, footprint_bytes)
        self._retired.unpin(entries, footprint_bytes)
        return True

    def release_all(self) -> None:
        """End every hold."""
        for hold_id in list(self._entries):
            self.release(hold_id)

    def expire(self) -> float | None:
        """End the holds whose time is over.

        Returns when the next one ends, on the clock; None if there is none.
        """
        if not self._entries:  # the usual case
            return None
        now = self._clock()
        while self._ends and (self._ends[0][0] <= now or self._ends[0][1] not in self._entries):
            self.release(heapq.heappop(self._ends)[1])
        return self._ends[0][0] if self._ends else None
