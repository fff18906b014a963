"""How long keys stay: a time at which they end, and protection from eviction.

A block may have a time to live. When it is over, the key is as if it had been deleted,
whoever holds it. A protected key is passed over by eviction, for a time or without an
end. It can be deleted, and put again: then its new block is protected for as long, if
that is within the bound. Nothing waits for the moment at which a time is over:
`take_due` is asked before every access to the index.

Protection has no owner, so the longest that anybody asked for counts.

What it promises: the cost of a key that has neither is nothing; all protected keys
together pin at most `max_protected_ratio` of the pool; a key that is gone is forgotten.

Leaves to others: to say which keys are gone or have another block (`removals`).
"""

import heapq
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import count
from math import inf

from infinistore.core.index import Entry, Index
from infinistore.core.limits import CoreLimits
from infinistore.core.pins import PinTable
from infinistore.core.pool import Pool

_FEW = 1024
_LONGEST_S = 1e9  # 31 years: what clients may ask for


class Retention:
    """The keys of one store that end at a time, and those that are protected.

    `pins` are those of all readers together.
    """

    def __init__(self, pool: Pool, pins: PinTable, limits: CoreLimits, clock: Callable[[], float]) -> None:
        self.ends: list[tuple[float, int, Sequence[str], dict[str, float]]] = []
        """A heap of (time, number, keys, what has the times of such keys); keys that
        are gone, or end at another time, stay in it for a while. Read it; empty if
        nothing ends."""
        self.look: Callable[[], Index] = Index
        """Returns the index, up to date. Whoever makes this sets it."""
        self._pool = pool
        self._pins = pins
        self._own = PinTable(pool.footprint)  # by protection alone
        self._limits = limits
        self.clock = clock
        self._end_of: dict[str, float] = {}
        self._protected: dict[str, Entry] = {}
        self._protected_until: dict[str, float] = {}  # those of them that are not for ever
        self._numbers = count()
        self._listed = 0  # keys in the heap

    # Times to live

    def end_in(self, keys: Sequence[str], ttl_s: float) -> None:
        """End keys that have just been put after so many seconds."""
        self._list(keys, self._end_in(ttl_s), self._end_of)

    def take_due(self) -> Sequence[str]:
        """Return the keys whose time is over; `removed` is told of them, or `put_back`
        if they could not be removed. End the protection whose time is over."""
        due: dict[str, None] = {}
        now = self.clock()
        while self.ends and self.ends[0][0] <= now:
            end, _, keys, end_of = heapq.heappop(self.ends)
            self._listed -= len(keys)
            over = [key for key in keys if end_of.get(key) == end]
            if end_of is self._protected_until:
                self._unpin(over)
            else:
                due.update(dict.fromkeys(over))
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

    def _end_in(self, ttl_s: float) -> float:
        return self.clock() + min(ttl_s, _LONGEST_S)

    def _list(self, keys: Sequence[str], end: float, end_of: dict[str, float]) -> None:
        """Note that keys, or their protection, end at a time."""
        end_of.update(dict.fromkeys(keys, end))
        heapq.heappush(self.ends, (end, next(self._numbers), keys, end_of))
        self._listed += len(keys)
        if self._listed > 2 * (len(self._end_of) + len(self._protected_until)) + _FEW:
            self._rebuild()  # most of it is out of date

    def _rebuild(self) -> None:
        left = [(end, n, [key for key in keys if of.get(key) == end], of) for end, n, keys, of in self.ends]
        self.ends[:] = [item for item in left if item[2]]
        heapq.heapify(self.ends)
        self._listed = sum(len(keys) for _, _, keys, _ in self.ends)

    # Protection

    @property
    def protected_keys(self) -> int:
        """How many keys are protected."""
        return len(self._protected)

    @property
    def protected_bytes(self) -> int:
        """What their blocks take of the pool."""
        return self._own.bytes

    def protect(self, keys: Sequence[str], ttl_s: float = 0) -> bytes:
        """Protect those of these keys that are there, for `ttl_s` seconds from now on,
        or without an end; return a byte for each key: 1 if it is protected now.

        What is protected for longer stays so. LimitExceeded, and nothing changed: too
        many keys, or all protected keys together would take too much.
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
        self._protect_for(found, fresh, ttl_s)
        return bytes(map(found.__contains__, keys))

    def _protect_for(self, keys: Iterable[str], fresh: Container[str], ttl_s: float) -> None:
        """Note how long these keys are protected; those in `fresh` were not before."""
        until = self._protected_until
        if not ttl_s:
            for key in until.keys() & keys if until else ():
                del until[key]
            return
        end = self._end_in(ttl_s)
        if longer := [key for key in keys if key in fresh or until.get(key, inf) < end]:
            self._list(longer, end, until)

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
        entries = []
        for key in keys:
            if (entry := self._protected.pop(key, None)) is not None:
                entries.append(entry)
                self._protected_until.pop(key, None)
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
            protected = [(i, self._protected_until.get(key)) for i, key in enumerate(keys) if key in self._protected]
            self.removed(keys)
            for position, end in protected:
                entry = entries[position]
                footprint_bytes = self._pool.footprint(entry[2])
                if self._limits.may_protect(self._own.bytes + footprint_bytes, self._pool.capacity_bytes):
                    self._pin({keys[position]: entry}, footprint_bytes)
                    if end is not None:  # the heap still has it
                        self._protected_until[keys[position]] = end

    # For another process

    def export(self, keys: Sequence[str]) -> tuple[list[tuple[int, float]], list[int], list[tuple[int, float]]]:
        """Return (position, seconds left) of those of these keys that end, the
        positions of those that are protected, and (position, seconds left) of those of
        them whose protection ends."""
        now = self.clock()

        def left(end_of: dict[str, float]) -> list[tuple[int, float]]:
            return [(i, max(0.0, end_of[key] - now)) for i, key in enumerate(keys) if key in end_of]

        return (
            left(self._end_of),
            [i for i, key in enumerate(keys) if key in self._protected],
            left(self._protected_until),
        )

    def adopt(
        self,
        ends: Iterable[tuple[str, float]],
        protected: Iterable[tuple[str, Entry]],
        protected_ends: Iterable[tuple[str, float]],
    ) -> None:
        """Go on with what another process exported, of keys that are here now."""
        for key, left_s in ends:
            self.end_in([key], left_s)
        blocks = dict(protected)
        self._pin(blocks, self._own.footprint(blocks.values()))
        for key, left_s in protected_ends:
            self._list([key], self._end_in(left_s), self._protected_until)
