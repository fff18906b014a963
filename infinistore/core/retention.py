"""How long keys stay: a time at which they end, and protection from eviction.

A block may have a time to live. When it is over, the key is as if it had been deleted,
whoever holds it. Nothing waits for that moment: `take_due` is asked before every access
to the index. A protected key is passed over by eviction. It can be deleted, and put
again: then its new block is protected, if that is within the bound.

What it promises: the cost of a key that has neither is nothing; all protected keys
together pin at most `max_protected_ratio` of the pool; a key that is gone is forgotten.

Leaves to others: to say which keys are gone or have another block (`removals`).
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count

from infinistore.core.entry import Entry
from infinistore.core.index import Index
from infinistore.core.limits import CoreLimits
from infinistore.core.pins import PinTable
from infinistore.core.pool import Pool

__all__ = ["Retention"]

_FEW = 1024
_LONGEST_S = 1e9  # 31 years: what clients may ask for


class Retention:
    """The keys of one store that end at a time, and those that are protected.

    `pins` are those of all readers together.
    """

    def __init__(self, pool: Pool, pins: PinTable, limits: CoreLimits, clock: Callable[[], float]) -> None:
        self.ends: list[tuple[float, int, Sequence[str]]] = []
        """A heap of (time, number, keys); keys that are gone, or end at another time,
        stay in it for a while. Read it; empty if no key ends."""
        self.look: Callable[[], Index] = Index
        """Returns the index, up to date. Whoever makes this sets it."""
        self._pool = pool
        self._pins = pins
        self._own = PinTable(pool.footprint)  # by protection alone
        self._limits = limits
        self.clock = clock
        self._end_of: dict[str, float] = {}
        self._protected: dict[str, Entry] = {}
        self._numbers = count()
        self._listed = 0  # keys in the heap

    # Times to live

    def end_in(self, keys: Sequence[str], ttl_s: float) -> None:
        """End keys that have just been put after so many seconds."""
        end = self.clock() + min(ttl_s, _LONGEST_S)
        self._end_of.update(dict.fromkeys(keys, end))
        heapq.heappush(self.ends, (end, next(self._numbers), keys))
        self._listed += len(keys)
        if self._listed > 2 * len(self._end_of) + _FEW:  # mostly out of date: forget those
            self._rebuild()

    def take_due(self) -> Sequence[str]:
        """Return the keys whose time is over; `removed` is told of them, or `put_back`
        if they could not be removed."""
        due: dict[str, None] = {}
        now = self.clock()
        while self.ends and self.ends[0][0] <= now:
            end, _, keys = heapq.heappop(self.ends)
            self._listed -= len(keys)
            due.update((key, None) for key in keys if self._end_of.get(key) == end)
        return list(due)

    def put_back(self, keys: Sequence[str]) -> None:
        """Return these keys with the next `take_due`."""
        self.end_in(keys, 0)

    def end_any(self, keys: Iterable[str]) -> bool:
        """Whether one of these keys ends at a time."""
        return bool(self._end_of) and not self._end_of.keys().isdisjoint(keys)

    def ending(self, keys: Iterable[str]) -> set[str]:
        """Return those of these keys that end at a time."""
        return self._end_of.keys() & keys

    def times_left(self, keys: Sequence[str]) -> list[float | None]:
        """Return for each key after how many seconds it ends: 0 for a key that is
        missing, None for one that does not end. LimitExceeded: too many keys."""
        self._limits.check_batch(len(keys))
        index = self.look()
        if not self._end_of:
            return [None if there else 0.0 for there in index.contains_many(keys)]
        now = self.clock()
        ends = [self._end_of.get(key) for key in keys]
        return [
            0.0 if not there else None if end is None else max(1e-6, end - now)
            for there, end in zip(index.contains_many(keys), ends, strict=True)
        ]

    def _rebuild(self) -> None:
        left = [(end, n, [key for key in keys if self._end_of.get(key) == end]) for end, n, keys in self.ends]
        self.ends[:] = [item for item in left if item[2]]
        heapq.heapify(self.ends)
        self._listed = sum(len(keys) for _, _, keys in self.ends)

    # Protection

    @property
    def protected_keys(self) -> int:
        """How many keys are protected."""
        return len(self._protected)

    @property
    def protected_bytes(self) -> int:
        """What their blocks take of the pool."""
        return self._own.bytes

    def protect(self, keys: Sequence[str]) -> bytes:
        """Protect those of these keys that are there; return a byte for each key: 1 if
        it is protected now.

        LimitExceeded, and nothing changed: too many keys, or all protected keys
        together would take too much.
        """
        self._limits.check_batch(len(keys))
        index = self.look()
        found = {key: entry for key, entry in zip(keys, index.get_many(keys), strict=True) if entry is not None}
        fresh = {key: entry for key, entry in found.items() if key not in self._protected}
        if fresh:
            entries = list(fresh.values())
            footprint_bytes = self._own.footprint(entries)
            self._limits.check_protected(self._own.bytes + footprint_bytes, footprint_bytes, self._pool.capacity_bytes)
            self._pin(fresh, footprint_bytes)
        return bytes(map(found.__contains__, keys))

    def unprotect(self, keys: Sequence[str]) -> bytes:
        """Protect these keys no more; return a byte for each: 1 if it was protected.
        LimitExceeded: too many keys."""
        self._limits.check_batch(len(keys))
        self.look()
        were = bytes(map(self._protected.__contains__, keys))
        self._unpin(keys)
        return were

    def without_protected(self, keys: Sequence[str]) -> Sequence[str]:
        """Return those of these keys that eviction may take."""
        return [key for key in keys if key not in self._protected] if self._protected else keys

    def _pin(self, blocks: dict[str, Entry], footprint_bytes: int) -> None:
        entries = list(blocks.values())
        self._pins.add(entries, footprint_bytes)
        self._own.add(entries, footprint_bytes)
        self._protected.update(blocks)

    def _unpin(self, keys: Iterable[str]) -> None:
        entries = [entry for key in keys if (entry := self._protected.pop(key, None)) is not None]
        if entries:  # they have their keys, so none of them waits for this
            footprint_bytes = self._own.footprint(entries)
            self._pins.remove(entries, footprint_bytes)
            self._own.remove(entries, footprint_bytes)

    # What becomes of keys

    def removed(self, keys: Sequence[str]) -> None:
        """Forget keys that are losing their blocks."""
        for key in self._end_of.keys() & keys if self._end_of else ():
            del self._end_of[key]
        if self._protected:
            self._unpin(keys)

    def replaced(self, keys: Sequence[str], entries: Sequence[Entry]) -> None:
        """Note new blocks of keys: they do not end, and are protected if the old ones
        were. One that is over the bound is not."""
        if self._end_of or self._protected:
            protected = [i for i, key in enumerate(keys) if key in self._protected]
            self.removed(keys)
            for position in protected:
                entry = entries[position]
                footprint_bytes = self._pool.footprint(entry[2])
                if self._limits.may_protect(self._own.bytes + footprint_bytes, self._pool.capacity_bytes):
                    self._pin({keys[position]: entry}, footprint_bytes)

    # For another process

    def export(self, keys: Sequence[str]) -> tuple[list[tuple[int, float]], list[int]]:
        """Return (position, seconds left) of those of these keys that end, and the
        positions of those that are protected."""
        now = self.clock()
        return (
            [(i, max(0.0, self._end_of[key] - now)) for i, key in enumerate(keys) if key in self._end_of],
            [i for i, key in enumerate(keys) if key in self._protected],
        )

    def adopt(self, ends: Iterable[tuple[str, float]], protected: Iterator[tuple[str, Entry]]) -> None:
        """Go on with what another process exported, of keys that are here now."""
        for key, left_s in ends:
            self.end_in([key], left_s)
        blocks = dict(protected)
        self._pin(blocks, self._own.footprint(blocks.values()))
