"""Which keys are there, where their blocks are, and which were used most recently.

One `collections.OrderedDict` is both index and recency order: its first key is the coldest, its last the warmest. Its
list of nodes keeps "take the coldest" O(1) for ever; a plain dict walked from the front slows down after many
deletions, because it steps over every hole.

The price: when the table behind it is rebuilt, one call waits for that, some 0.2 s with a million keys, once in several
hundred thousand insertions (as for any dict; a plain one takes half as long).

An entry is an exact tuple of integers, because the garbage collector stops looking at those after the first time; a
million objects of a class would be walked by every full collection. For the same reason there is no method per block
here: a batch is one call, whose loop runs in C.

Promises: a batch is touched from last to first, so that the head of a prefix outlives its tail.
Leaves to others: pins, room and limits (the store).
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat, takewhile
from typing import Any, TypeAlias

__all__ = ["NO_CHECKSUM", "Entry", "Index", "first_keys", "leading_within"]

Entry: TypeAlias = tuple[int, int, int, int]
"""A block that has a key: (arena index, offset in bytes, length in bytes, xxh3-64 checksum or NO_CHECKSUM)."""

NO_CHECKSUM = 0
"""Stands for the checksum of a block whose writer made none. (One in 2**64 blocks has this as its checksum; nobody
checks those.)"""


class Index:
    """Keys to entries, in recency order. All keys are str; nothing here checks that."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self.pop_item: Callable[[bool], tuple[str, Entry]] = self._entries.popitem
        """pop_item(False) -> (key, entry): takes out the coldest key; pop_item(True) the warmest. KeyError if none."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the keys, coldest first."""
        return iter(self._entries)

    def __reversed__(self) -> Iterator[str]:
        """Iterate over the keys, warmest first."""
        return reversed(self._entries)

    def get(self, key: str) -> Entry | None:
        """Return the entry of a key, or None. Does not touch."""
        return self._entries.get(key)

    def get_many(self, keys: Iterable[str]) -> list[Entry | None]:
        """Return the entry of each key, None for those missing. Does not touch."""
        return list(map(self._entries.get, keys))

    def contains_many(self, keys: Iterable[str]) -> bytes:
        """Return one byte per key: 1 if it is there, 0 if not. Does not touch."""
        return bytes(map(self._entries.__contains__, keys))

    def leading(self, keys: Iterable[str]) -> list[str]:
        """Return the keys up to the first one that is missing. Does not touch."""
        return list(takewhile(self._entries.__contains__, keys))

    def touch(self, keys: Sequence[str]) -> None:
        """Make the keys the warmest, the first of them the warmest of all. KeyError if one is missing."""
        _run(map(self._entries.move_to_end, reversed(keys)))

    def disjoint(self, keys: Iterable[str]) -> bool:
        """Return whether none of the keys is there."""
        return self._entries.keys().isdisjoint(keys)

    def insert(self, keys: Sequence[str], entries: Sequence[Entry]) -> None:
        """Add keys that are not there, as the warmest, the first of them the warmest of all."""
        _run(map(self._entries.__setitem__, reversed(keys), reversed(entries)))

    def remove_many(self, keys: Iterable[str]) -> list[Entry]:
        """Take keys out, and return the entries of those that were there."""
        return list(filter(None, map(self._entries.pop, keys, repeat(None))))

    def put_warmest(self, key: str, entry: Entry) -> None:
        """Put back a key that was taken out, as the warmest."""
        self._entries[key] = entry


def _run(iterator: Iterable[Any]) -> None:
    """Exhaust an iterator at C speed."""
    deque(iterator, maxlen=0)


def first_keys(keys: Iterable[str], prefix: str, limit: int, after: str) -> list[str]:
    """Return the first `limit` keys that begin with `prefix` and come after `after`, in code point order."""
    found: Iterable[str] = filter(after.__lt__, keys) if after else keys
    if prefix:
        found = (key for key in found if key.startswith(prefix))
    return heapq.nsmallest(limit, found)


def leading_within(entries: Sequence[Entry | None], max_bytes: int) -> int:
    """Return how many leading entries have at most `max_bytes` together, at least one (of a batch that has any)."""
    total = 0
    for position, entry in enumerate(entries):
        if entry is not None:
            total += entry[2]
            if total > max_bytes and position:
                return position
    return len(entries)
