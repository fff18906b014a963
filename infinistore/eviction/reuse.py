"""How soon keys are used again, from a sample of them.

The *distance* of a use is the number of different keys that were used since the key's
last use: its place in a stack ordered by recency (Mattson et al., IBM Systems Journal
9(2), 1970). A pool with room for more keys than that, least recently used first, has
the block; a smaller one has evicted it. So the distances tell how many hits a pool of
any size would have had, also the hits that this one did not have.

Keys are sampled as SHARDS does (Waldspurger et al., FAST'15), but when they are put and
not by a hash, which would have to be computed for every key: one key in every few, at
random. A sampled key that is evicted stays in the sample for a while. If it is put
again, that use was a miss; the new block is sampled or not like any other.

The distance of a use follows from how many sampled keys were used since. They are
counted by *slots*, a slot being the time in which a sixteenth of the pool is used. Two
uses in one slot count as one: an engine looks a prefix up, and then reads it.

What it promises: while the pool is not full, it costs nothing; else a set operation on
the keys of a call. It keeps a few thousand keys at most, and walks over them once in
each *turn*: each time that about as many keys were used as the pool has. The same calls
give the same figures.
"""

from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from itertools import islice
from random import Random
from typing import Any, Final, NamedTuple

__all__ = ["Reuse", "WantedPool"]

SAMPLED_KEYS: Final = 512
"""About how many of the keys in the pool are in the sample."""
_SPARE_BYTES: Final = 128 * 1024
"""One key is sampled for so many bytes that are put, at most. A sampled key takes a few
microseconds, which is much beside the copy of a short block."""
PARTS: Final = 8
"""Distances are counted in these parts of the pool."""
MOST_POOLS: Final = 8
"""Distances above so many pools are not followed, and a trial is so many turns long at
most."""
_SLOTS: Final = 16
"""Slots of a turn."""
_MOST_SLOTS: Final = 64 * _SLOTS
"""So many are kept at most."""
_MOST = 0.9
_FEW = 8
"""Fewer sampled keys that were put again tell nothing."""


class WantedPool(NamedTuple):
    """A pool that would have had nine tenths of the blocks that were put again after
    they had been evicted, as far as `MOST_POOLS` of the present one would."""

    pools: float = 1.0
    """Its size in present pools; 1 if there were no such blocks."""
    avoidable: float = 0.0
    """The part of the blocks put lately that it would have had."""


class Reuse:
    """The distances of one store, whose keys are `order`.

    `sample(n)` returns up to n of the keys, chosen at random.
    """

    def __init__(self, order: Mapping[str, Any], sample: Callable[[int], list[str]]) -> None:
        self.watched: dict[str, int] = {}
        """The sampled keys, with the number of the slot of the last use of each. Empty
        unless the store evicts."""
        self.on_turn: Callable[[], bool] = bool
        """Called at the end of each turn; returns whether to begin another trial. It
        is the strategy's."""
        self.on_wanted: Callable[[WantedPool], object] = bool
        """Called at the end of each turn with `wanted`. It is the server's."""
        self.wanted = WantedPool()
        """The pool that would have been better until the end of the last turn."""
        self.pool_keys = 0
        """How many keys the pool had when the turn began; 0 while the store does not
        evict. Only then `put` need not be called."""
        self.position = 0.0
        """How many keys were used until now, those of one use counted once. It grows
        with every put."""
        self.hits = 0
        """In this trial: uses of sampled keys that were there."""
        self.recent = 0
        """In this trial: uses of sampled keys that would have been hits with the least
        recently used strategy."""
        self.standing = 0
        """In this trial: uses of sampled keys that were in the pool when it began. As
        many would have been hits if nothing had been evicted since."""
        self.turns = 0
        """How many turns of this trial are over."""
        self.step = 1
        """One put in so many is sampled, so each use counted stands for so many."""
        self.asked_again = [0.0] * (PARTS * MOST_POOLS)
        """How many keys were put again after they had been evicted, by distance in
        parts of the pool. Those of each earlier turn count half as much."""
        self.puts = 0.0
        """How many keys were put in that time."""
        self._order = order
        self._sample = sample
        self._standing_keys: Container[str] = frozenset()
        self._evicted = False  # anything in this turn
        self._idle_turns = 0
        self._least_step = 1
        self._left = 0
        self._turn_end = 0.0
        self._slot_end = 0.0
        self._slot = 0  # the number of the present one
        self._in_slots: deque[int] = deque([0])  # watched keys last used in each; the present one is last
        self._random = Random(1)  # to be fair, not to be unforeseen

    def evicting(self, block_bytes: int) -> None:
        """Note that keys are about to be evicted: begin, if that is new. The block of
        one of them has so many bytes."""
        self._evicted = True
        if not self.pool_keys and self._order:
            self._least_step = max(1, _SPARE_BYTES // block_bytes)
            self._begin_turn()
            for key in self._sample(self.pool_keys // self.step):
                self._watch(key)
            self._begin_trial()

    def used(self, keys: Sequence[str]) -> None:
        """Note the use of keys that are there. Only for those in `watched`."""
        for key in self.watched.keys() & keys:
            slot = self.watched[key]
            if slot != self._slot:
                self.hits += 1
                self.recent += self._distance(slot) <= self.pool_keys
                self.standing += key in self._standing_keys
                self._unwatch(key)
                self._watch(key)
                self.position += self.step
        if self.position >= self._slot_end:
            self._next_slot()

    def put(self, keys: Sequence[str]) -> None:
        """Note that keys are about to be added to the order. Those that are there get
        other blocks only."""
        watched = self.watched
        if not watched.keys().isdisjoint(keys):  # they are evicted and put again, or get other blocks
            for key in [key for key in watched.keys() & keys if key not in self._order]:
                distance = self._distance(watched[key])
                self._unwatch(key)
                self.recent += distance <= self.pool_keys
                self.standing += key in self._standing_keys
                part = int(distance * PARTS / self.pool_keys)
                if part < len(self.asked_again):
                    self.asked_again[part] += self.step
        count = len(keys)
        self._left -= count
        while self._left < 0:
            if keys[self._left] not in watched:
                self._watch(keys[self._left])
            self._left += 1 + int(self._random.random() * (2 * self.step - 1))
        self.position += count
        self.puts += count
        if self.position >= self._slot_end:
            self._next_slot()

    def forget(self, keys: Sequence[str]) -> None:
        """Note that keys are removed for another reason than eviction."""
        if self.watched:
            for key in self.watched.keys() & keys:
                self._unwatch(key)

    def _watch(self, key: str) -> None:
        self.watched[key] = self._slot
        self._in_slots[-1] += 1

    def _unwatch(self, key: str) -> None:
        self._in_slots[self.watched.pop(key) - self._slot - 1] -= 1

    def _distance(self, slot: int) -> float:
        """Return how many keys were used since a slot."""
        since = slot - self._slot - 1  # its place, from the end
        return self.step * (sum(islice(reversed(self._in_slots), -since - 1)) + self._in_slots[since] / 2)

    def _next_slot(self) -> None:
        if self.position >= self._turn_end:
            self._turn()
        self._slot += 1
        self._in_slots.append(0)
        self._slot_end = self.position + max(1, self.pool_keys / _SLOTS)

    def _turn(self) -> None:
        self.turns += 1
        self.wanted = self._wanted()
        self.on_wanted(self.wanted)
        trial_is_over = self.on_turn() or self.turns == MOST_POOLS
        self._idle_turns = 0 if self._evicted else self._idle_turns + 1
        if self._idle_turns == MOST_POOLS:
            self._stop()
            return
        self._forget_old()
        self.asked_again = [count / 2 for count in self.asked_again]
        self.puts /= 2
        self._begin_turn()
        if trial_is_over:
            self._begin_trial()

    def _wanted(self) -> WantedPool:
        again = sum(self.asked_again)
        had = 0.0
        for parts, count in enumerate(self.asked_again if again >= _FEW * self.step else (), 1):
            had += count
            if had >= _MOST * again:
                # Some were evicted sooner than others that were used before them.
                return WantedPool(max(parts, PARTS + 1) / PARTS, min(1.0, had / self.puts))
        return WantedPool()

    def _forget_old(self) -> None:
        """Forget the keys that were used too long ago."""
        left = MOST_POOLS * self.pool_keys / self.step
        kept = 0
        for count in reversed(self._in_slots):
            left -= count
            kept += 1
            if left < 0 or kept == _MOST_SLOTS:
                break
        while len(self._in_slots) > kept:
            self._in_slots.popleft()
        oldest = self._slot - kept
        self.watched = {key: slot for key, slot in self.watched.items() if slot > oldest}

    def _begin_turn(self) -> None:
        self.pool_keys = len(self._order)
        self.step = max(self._least_step, self.pool_keys // SAMPLED_KEYS)
        self._turn_end = self.position + max(1, self.pool_keys)
        self._slot_end = self.position + max(1, self.pool_keys / _SLOTS)
        self._evicted = False

    def _begin_trial(self) -> None:
        self.turns = self.hits = self.recent = self.standing = 0
        self._standing_keys = self.watched.keys() & self._order.keys()

    def _stop(self) -> None:
        """Forget all until the store evicts again."""
        self.pool_keys = self._idle_turns = 0
        self.watched = {}
        self._in_slots = deque([0])
        self.asked_again = [0.0] * len(self.asked_again)
        self.puts = 0.0
        self.wanted = WantedPool()
