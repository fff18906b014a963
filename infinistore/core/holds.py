"""Holds: pins that outlive their connection, and end by themselves.

A scheduler matches a prefix in one process, and another process reads it a moment later. In between, a hold keeps the
matched blocks from being evicted. It ends when it is released, by anyone who knows its id, or when its time is over.

This module only remembers which hold pins what until when; the store takes and gives back the pins.
"""

import heapq
import random

from infinistore.core.index import Entry

__all__ = ["Holds"]


class Holds:
    """Open holds, by id. Ids are random, so that one is not guessed from another; 0 is never one."""

    def __init__(self, random: random.Random) -> None:
        self._random = random
        self._entries: dict[int, list[Entry]] = {}
        self._ends: list[tuple[float, int]] = []  # a heap; ids released early stay in it until their time

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entries: list[Entry], end: float) -> int:
        """Remember a hold on `entries` until the clock shows `end` seconds, and return its id, 1 to 2**63 - 1."""
        hold_id = 0
        while not hold_id or hold_id in self._entries:
            hold_id = self._random.getrandbits(63)
        self._entries[hold_id] = entries
        if len(self._ends) > 2 * len(self._entries) + 64:  # mostly released early: forget those
            self._ends = [(end, hold) for end, hold in self._ends if hold in self._entries]
            heapq.heapify(self._ends)
        heapq.heappush(self._ends, (end, hold_id))
        return hold_id

    def remove(self, hold_id: int) -> list[Entry] | None:
        """Forget a hold and return what it pinned; None if there is no such hold."""
        return self._entries.pop(hold_id, None)

    def remove_ended(self, now: float) -> list[list[Entry]]:
        """Forget every hold whose end is at or before `now`, and return what each pinned."""
        ended: list[list[Entry]] = []
        while self._ends and self._ends[0][0] <= now:
            entries = self._entries.pop(heapq.heappop(self._ends)[1], None)
            if entries is not None:
                ended.append(entries)
        return ended

    def next_end(self) -> float | None:
        """Return when the next hold ends, in seconds of the clock; None if there is none."""
        while self._ends and self._ends[0][1] not in self._entries:
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else None
