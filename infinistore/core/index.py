"""Which keys are there, where their blocks are, and which were used most recently.

One `collections.OrderedDict` is both index and recency order: its first key is the
coldest, its last the warmest. Its list of nodes keeps "take the coldest" O(1) for ever;
a plain dict walked from the front slows down after many deletions, because it steps
over every hole.

The cost: once in several hundred thousand insertions the hash table is rebuilt, and one
call waits for it, about 0.2 s with a million keys. That is so for any dict; a plain one
takes half as long.

There is no method per block here: a batch is one call, whose loop runs in C.

Promises: a batch is touched from last to first, so that the head of a prefix outlives
its tail. Leaves to others: pins, space and limits (the store).
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence, ValuesView
from itertools import repeat, takewhile
from random import Random
from typing import Any

from infinistore.core.entry import Entry, length_of
from infinistore.core.key_sample import KeySample

__all__ = ["Index", "first_keys", "leading_within"]


class Index:
    """Keys to entries, in recency order. All keys are str; nothing here checks that."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._sample = KeySample(self._entries)

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
        """Make keys the most recent ones, the first key the most recent of all.

        KeyError if one is missing.
        """
        _run(map(self._entries.move_to_end, reversed(keys)))

    def touch_one(self, key: str) -> None:
        """Make a key the most recent one. KeyError if it is missing."""
        self._entries.move_to_end(key)

    def disjoint(self, keys: Iterable[str]) -> bool:
        """Return whether none of the keys is there."""
        return self._entries.keys().isdisjoint(keys)

    def insert(self, keys: Sequence[str], entries: Sequence[Entry]) -> None:
        """Add missing keys as the most recent, the first key the most recent of all.

        Keys that exist get the new entries and keep their place in the order.
        """
        _run(map(self._entries.__setitem__, reversed(keys), reversed(entries)))
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
        _run(map(self._entries.pop, keys, repeat(None)))
        return before - len(self._entries)


def _run(iterator: Iterable[Any]) -> None:
    """Exhaust an iterator at C speed."""
    deque(iterator, maxlen=0)


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
