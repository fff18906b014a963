"""Which keys are there, where their blocks are, and which are evicted first.

An `Entry` is what is kept of a block. One `collections.OrderedDict` is both index and
order of eviction: its first key is the coldest, its last the warmest. A strategy moves
keys in it (`infinistore.eviction`), by default by recency. Its list of nodes
keeps "take the coldest" O(1) for ever; a plain dict walked from the front slows down
after many deletions, because it steps over every hole. The cost: once in several
hundred thousand insertions the hash table is rebuilt, and one call waits for it, about
0.2 s with a million keys. That is so for any dict; a plain one takes half as long.

There is no method per block here: a batch is one call, whose loop runs in C.

A random sample of the keys is kept up to date as keys are inserted. A million are too
many to walk while a server waits, and the ends of the order are the coldest and
warmest keys and not representative. So one insertion in every few is noted, chosen at
random. A note counts as long as its key still has the same entry. So every existing key
was noted with the same probability, however often it was put. The cost is one
subtraction per batch, and less than 1 us for each insertion noted.

Promises: a batch is touched from last to first, so that the head of a prefix outlives
its tail. Leaves to others: pins, space and limits (the store).
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, ValuesView
from itertools import islice, repeat, takewhile
from operator import itemgetter
from random import Random
from typing import Any, Final, TypeAlias

from infinistore.allocators.base import Extent
from infinistore.eviction.base import Eviction, LeastRecentlyUsed
from infinistore.eviction.reuse import Reuse

BYTES_PER_KEY: Final = 350
"""What the process needs for each key of 40 characters (CPython 3.11, x86-64)."""

# An exact tuple, because both kinds of named fields cost too much. The garbage
# collector stops tracking exact tuples of integers, and only these: with a million
# entries, a full collection takes 1 ms, but 180 ms with a NamedTuple and 140 ms with a
# class that has slots. And `extent + (checksum,)` makes an exact tuple in one step:
# with a NamedTuple, a put of 64 blocks took 24 % more instructions (bench/guard.py). So
# the names are functions, which also run in `map` at the speed of C.
Entry: TypeAlias = tuple[int, int, int, int]
"""A block that has a key: (arena index, offset in bytes, length in bytes, xxh3-64
checksum or NO_CHECKSUM). The first three are its extent."""

NO_CHECKSUM = 0
"""Stands for the checksum of a block whose writer made none. (One in 2**64 blocks has
this as its checksum; nobody checks those.)"""

arena_of: Callable[[Entry | Extent], int] = itemgetter(0)
offset_of: Callable[[Entry | Extent], int] = itemgetter(1)
length_of: Callable[[Entry | Extent], int] = itemgetter(2)
checksum_of: Callable[[Entry], int] = itemgetter(3)
extent_of: Callable[[Entry], Extent] = itemgetter(0, 1, 2)


_FIRST_STEP = 32
_FIRST_OFFSET = int(Random(0).random() * _FIRST_STEP)
MAX_NOTED = 4096


class KeySample:
    """Some of the keys of `entries`. Whoever inserts keys there calls `note`."""

    __slots__ = ("_entries", "_noted", "_offset", "_random", "_step", "left")

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self._entries = entries
        self._noted: list[tuple[str, Any]] = []
        self._random: Random | None = None  # made when first needed: it takes 2.5 KiB
        self._step = _FIRST_STEP  # one insertion in so many is noted,
        self._offset = _FIRST_OFFSET  # this one of them
        self.left = self._offset
        """How many insertions are to be passed over. Whoever inserts takes off theirs,
        and calls `note` below zero."""

    def note(self, keys: Sequence[str], entries: Sequence[Any]) -> None:
        """Note what is due of a batch that was inserted, and taken off `left`."""
        count, step, offset = len(keys), self._step, self._offset
        random = self._random
        if random is None:
            random = self._random = Random(1)  # to be fair, not to be unforeseen: the same calls give the same sample
        position = self.left + count
        while position < count:
            self._noted.append((keys[position], entries[position]))
            position += step - offset
            offset = int(random.random() * step)
            position += offset
        self.left, self._offset = position - count, offset
        if len(self._noted) > MAX_NOTED:
            self._noted = self._present()
            if len(self._noted) > MAX_NOTED // 2:
                self._noted = [noted for noted in self._noted if random.getrandbits(1)]
                self._step *= 2

    def keys(self) -> list[str]:
        """Return the sample: at most `MAX_NOTED` keys, in arbitrary order."""
        return [key for key, _ in self._present()]

    def _present(self) -> list[tuple[str, Any]]:
        get = self._entries.get
        return [noted for noted in self._noted if get(noted[0]) is noted[1]]


class Index:
    """Keys to entries, in the order of eviction. All keys are str; nothing here checks
    that. `eviction` is the class of the strategy that keeps the order."""

    def __init__(self, eviction: type[Eviction] = LeastRecentlyUsed) -> None:
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._sample = KeySample(self._entries)
        self.reuse = Reuse(self._entries, self.sample)
        """How soon keys are used again."""
        self._eviction = eviction(self._entries, self.reuse)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the keys, coldest first."""
        return iter(self._entries)

    def entries(self) -> ValuesView[Entry]:
        """Return the entries, to iterate over, coldest first."""
        return self._entries.values()

    def get(self, key: str) -> Entry | None:
        """Return the entry of a key, or None. Does not touch."""
        return self._entries.get(key)

    def get_many(self, keys: Iterable[str]) -> list[Entry | None]:
        """Return the entry of each key, None for those missing. Does not touch."""
        return list(map(self._entries.get, keys))

    def contains_many(self, keys: Iterable[str]) -> bytes:
        """Return one byte per key: 1 if it is there, 0 if not. Does not touch."""
        return bytes(map(self._entries.__contains__, keys))

    def those_there(self, keys: Iterable[str]) -> list[str]:
        """Return those of the keys that are there, each once. Does not touch."""
        return list(filter(self._entries.__contains__, dict.fromkeys(keys)))

    def leading(self, keys: Iterable[str]) -> list[str]:
        """Return the keys up to the first one that is missing. Does not touch."""
        return list(takewhile(self._entries.__contains__, keys))

    def touch(self, keys: Sequence[str]) -> None:
        """Note that keys were used, the first key last of all. KeyError if one is
        missing."""
        reuse = self.reuse
        if reuse.watched and not reuse.watched.keys().isdisjoint(keys):
            reuse.used(keys)
        self._eviction.touch(keys)

    def touch_one(self, key: str) -> None:
        """Note that a key was used. KeyError if it is missing."""
        if key in self.reuse.watched:
            self.reuse.used((key,))
        self._eviction.touch_one(key)

    def coldest(self, count: int) -> list[str]:
        """Return up to so many keys for eviction, the coldest first."""
        self.reuse.evicting(next(map(length_of, self._entries.values()), 1))
        return list(islice(self._entries, count))

    def pass_over(self, keys: Sequence[str]) -> None:
        """Move keys that `coldest` returned to the warm end. This is no use."""
        self._eviction.pass_over(keys)

    def disjoint(self, keys: Iterable[str]) -> bool:
        """Return whether none of the keys is there."""
        return self._entries.keys().isdisjoint(keys)

    def insert(self, keys: Sequence[str], entries: Sequence[Entry]) -> None:
        """Add missing keys, the first key last of all.

        Keys that exist get the new entries and keep their place in the order.
        """
        if self.reuse.pool_keys:
            self.reuse.put(keys)
        self._eviction.insert(keys, entries)
        sample = self._sample
        sample.left -= len(keys)
        if sample.left < 0:
            sample.note(keys, entries)

    def sample(self, limit: int) -> list[str]:
        """Return up to `limit` keys: all of them, or a fair random sample.

        Walks over 8 times the limit at most. A store that was once far larger may
        return fewer.
        """
        count = len(self._entries)
        keys = self._sample.keys() if count > 8 * limit else list(self._entries)
        return keys if len(keys) <= limit else Random(count).sample(keys, limit)

    def remove(self, keys: Iterable[str]) -> int:
        """Take keys out, as many of them as are there; return how many."""
        before = len(self._entries)
        deque(map(self._entries.pop, keys, repeat(None)), 0)  # a loop in C
        return before - len(self._entries)


def first_keys(keys: Iterable[str], prefix: str, limit: int, after: str) -> list[str]:
    """Return the first `limit` keys with a prefix, after `after`, by code point."""
    found: Iterable[str] = filter(after.__lt__, keys) if after else keys
    if prefix:
        found = (key for key in found if key.startswith(prefix))
    return heapq.nsmallest(limit, found)


def leading_within(entries: Sequence[Entry | None], max_bytes: int) -> int:
    """Return how many leading entries have at most `max_bytes` together.

    At least one, if there are any.
    """
    total = 0
    for position, entry in enumerate(entries):
        if entry is not None:
            total += length_of(entry)
            if total > max_bytes and position:
                return position
    return len(entries)
