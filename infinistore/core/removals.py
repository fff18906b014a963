"""Removals: how keys lose their blocks: by deletion, replacement, eviction, damage, or
because their time is over; and the log of them.

A removal has three steps: announce it, scan the hazards, take the keys away and retire
their blocks. The first two call others and may fail; then nothing has changed. The last
one cannot fail, so no space is lost.

The log has the last removals of one store, by their numbers, for those who follow them.
It counts a key that loses its block and gets no other; one that is put over another is
not removed. Nobody is remembered who asks: each question names the number to go on
from. A log is kept from the first question until some time after the last one, and
costs next to nothing before and after. It promises that every removal since the log
began has a number, one more than that before; that at most `MOST_KEYS` keys, and
`MOST_BYTES` bytes of them, are kept, the last ones; and that whoever asks for what is
kept no more hears how many that are.

Leaves to others: when the space of a retired block is free (`pins`), which blocks are
evicted (`space`), and where else than in memory a key may be.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from random import Random
from typing import NamedTuple

import xxhash

from infinistore.core.deletions import Deletions
from infinistore.core.index import NO_CHECKSUM, Entry, Index, checksum_of, extent_of, length_of
from infinistore.core.journal import Change, Journal
from infinistore.core.pins import Retired
from infinistore.core.pool import Pool
from infinistore.core.retention import Retention

MOST_KEYS = 65_536
MOST_BYTES = 8 * 1024 * 1024
MAX_TOLD_KEYS = 10_000
"""How many removals one answer is about, at most."""
KEPT_S = 300.0
"""How long a log is kept after the last question."""


class Told(NamedTuple):
    """An answer: keys that were removed and are not there, in order; the place to go on
    from, which is the id of a log and a number; and how many removals in between are
    not kept any more, None if nobody knows."""

    keys: list[str]
    place: tuple[int, int]
    missed: int | None = 0


class RemovalLog:
    """The log of one store. `clock` returns seconds, `random` makes the ids of logs."""

    def __init__(
        self,
        clock: Callable[[], float],
        random: Random,
        *,
        most_keys: int = MOST_KEYS,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self.is_kept = False
        """Whether `note` is to be called."""
        self.id = 0
        """Which log it is, among all of all servers; 0 while none is kept."""
        self.next = 0
        """The number of the next removal."""
        self.waiting: list[Callable[[], object]] = []
        """Called once, with the next removal. They must not call the store."""
        self._clock = clock
        self._random = random
        self._most_keys = most_keys
        self._most_bytes = most_bytes
        self._until = 0.0
        self._keys: deque[str] = deque()
        self._bytes = 0

    def note(self, keys: Sequence[str]) -> None:
        """Add keys that were removed, unless nobody asks, or not for long."""
        if not keys or not self.is_kept:
            return
        if self._clock() > self._until:
            self.end()
            return
        self.next += len(keys)
        kept = self._keys
        if len(keys) >= self._most_keys:
            kept.clear()
            self._bytes = 0
            keys = keys[-self._most_keys :]
        kept.extend(keys)
        self._bytes += sum(map(len, keys))
        if (excess := len(kept) - self._most_keys) > 0:
            self._bytes -= sum([len(kept.popleft()) for _ in range(excess)])
        while self._bytes > self._most_bytes:
            self._bytes -= len(kept.popleft())
        self.wake()

    def end(self) -> None:
        """Forget everything. Whoever goes on asking finds another log."""
        self.is_kept = False
        self.id = self.next = self._bytes = 0
        self._keys.clear()
        self.wake()

    def wake(self) -> None:
        """Call those who wait."""
        if self.waiting:
            waiting, self.waiting = self.waiting, []
            for call in waiting:
                call()

    def stop_waiting(self, call: Callable[[], object]) -> None:
        """Call this no more; no effect if it was called."""
        if call in self.waiting:
            self.waiting.remove(call)

    def told(self, place: tuple[int, int], most: int, exists: Callable[[list[str]], bytes]) -> Told:
        """Return up to `most` removals since a place, and go on keeping the log.

        `exists` tells which of them are there again. Another log's place tells only
        where this one is. ValueError: there has been no such number.
        """
        if not self.is_kept:
            self.is_kept = True
            self.id = self._random.getrandbits(63) + 1
        self._until = self._clock() + KEPT_S
        log, number = place
        if log != self.id:
            return Told([], (self.id, self.next), None if log else 0)
        if number > self.next:
            raise ValueError(f"{number} removals cannot have been told: there have been {self.next}")
        first = self.next - len(self._keys)
        begin = max(number, first)
        removed = list(islice(self._keys, begin - first, begin - first + most))
        keys = list(dict.fromkeys(removed))
        if keys:
            keys = [key for key, there in zip(keys, exists(keys), strict=True) if not there]
        return Told(keys, (log, begin + len(removed)), begin - number)


SLICE_KEYS = 4096
"""How many keys one step of long work looks at, which takes a few milliseconds."""


class Removals:
    """The removals of one store. Those who call it have an index that is up to date."""

    def __init__(
        self,
        pool: Pool,
        retired: Retired,
        retention: Retention,
        *,
        log: RemovalLog,
        deletions: Deletions,
        journal: Journal | None,
    ) -> None:
        self.on_removal: Callable[[Sequence[Entry]], object] | None = None
        """Called with blocks that lose their keys, before their space is used again."""
        self.deleted = 0
        """Keys deleted or purged."""
        self.expired = 0
        """Keys whose time to live was over."""
        self.checksum_drops = 0
        """Blocks dropped because their bytes did not match their checksum."""
        self._pool = pool
        self._retired = retired
        self._retention = retention
        self._log = log
        self._deletions = deletions
        self._journal = journal

    def announce(self, entries: list[Entry]) -> None:
        """Say that blocks are losing their keys."""
        if entries and self.on_removal is not None:
            self.on_removal(entries)

    def remove(self, index: Index, keys: Sequence[str], entries: list[Entry]) -> int:
        """Take keys away and retire their blocks, `entries`; return how many. A key
        that is named twice goes once."""
        self.announce(entries)
        scanned = self._retired.scan_for(entries)
        gone = index.those_there(keys) if self._log.is_kept else ()
        removed = index.remove(keys)
        self._retention.removed(keys)
        self._retired.add(entries if removed == len(entries) else list(set(entries)), scanned=scanned)
        if gone:
            self._log.note(gone)
        return removed

    def replace(self, index: Index, keys: Sequence[str], entries: Sequence[Entry]) -> None:
        """Give keys these blocks. `Retired.tidy` frees the space of those that they
        had."""
        before = [] if index.disjoint(keys) else list(filter(None, index.get_many(keys)))
        self.announce(before)
        index.insert(keys, entries)
        if before:
            index.touch(keys)
            self._retention.replaced(keys, entries)
            self._retired.add(before, scanned=False)

    def delete(self, index: Index, keys: Sequence[str], change: Change = "delete") -> int:
        """Remove those of the keys that are there; return how many."""
        self._deletions.note(keys)
        return self._delete(index, keys, change)

    def _delete(self, index: Index, keys: Sequence[str], change: Change) -> int:
        entries = list(filter(None, index.get_many(keys)))
        index.reuse.forget(keys)
        deleted = self.remove(index, keys, entries)
        self.deleted += deleted
        if self._journal is not None:
            self._journal.append(change, keys)
        return deleted

    def expire(self, index: Index) -> None:
        """Remove the keys whose time to live is over."""
        keys = self._retention.take_due()
        if not keys:
            return
        entries = list(filter(None, index.get_many(keys)))
        try:
            index.reuse.forget(keys)
            self.expired += self.remove(index, keys, entries)
        except BaseException:
            self._retention.put_back(keys)
            raise
        if self._journal is not None:
            self._journal.append("delete", keys)

    def purge(self, index: Index, max_keys: int | None) -> int:
        """Remove every key, or the coldest `max_keys` of them; return how many."""
        change: Change = "purge" if max_keys is None else "delete"
        self._deletions.note_all()
        return self._delete(index, list(islice(index, max_keys)), change)

    def purge_in_slices(self, up_to_date: Callable[[], Index]) -> Iterator[int]:
        """Remove every key that is there when this begins, a few milliseconds of them
        at a time; yield how many. Keys that come between two slices stay.

        Recency says nothing about what was there: others touch keys in between.
        """
        keys, first = list(up_to_date()), 0
        self._deletions.note_all()
        while first < len(keys):
            some = keys[first : first + self.slice_keys()]
            yield self._delete(up_to_date(), some, "delete")
            first += len(some)

    def slice_keys(self) -> int:
        """How many keys the next slice of a purge has."""
        return SLICE_KEYS

    def drop_if_damaged(self, index: Index, key: str) -> bool:
        """Hash the block of a key again, and remove it if it has changed; return
        whether it was removed."""
        entry = index.get(key)
        if entry is None or checksum_of(entry) == NO_CHECKSUM:
            return False
        if xxhash.xxh3_64_intdigest(self._pool.view(extent_of(entry))) == checksum_of(entry):
            return False
        self.remove(index, [key], [entry])
        self.checksum_drops += 1
        if self._journal is not None:
            self._journal.append("drop", [key])
        return True


class Unverified:
    """The blocks of `waiting`, in the order in which they are hashed if nobody asks for
    them."""

    def __init__(self, removals: Removals, waiting: Mapping[str, Entry]) -> None:
        self._removals = removals
        self._waiting = dict(waiting)
        self._order = iter(list(waiting))
        self.dropped = 0
        """How many did not match their checksums."""

    def __len__(self) -> int:
        return len(self._waiting)

    def verify(self, index: Index, keys: Sequence[str]) -> bool:
        """Hash the blocks of these keys that nobody has hashed; whether any was
        dropped."""
        if not self._waiting or self._waiting.keys().isdisjoint(keys):
            return False
        before = self.dropped
        for key in keys:
            self._verify(index, key)
        return self.dropped > before

    def verify_some(self, index: Index, most_bytes: int) -> bool:
        """Hash about so many bytes of blocks, at least one block; whether any is
        left."""
        for key in self._order:
            most_bytes -= self._verify(index, key)
            if most_bytes <= 0:
                break
        return bool(self._waiting)

    def _verify(self, index: Index, key: str) -> int:
        """Hash a block, if it still has its key; return how many bytes that were."""
        entry = self._waiting.pop(key, None)
        if entry is None or index.get(key) != entry:  # replaced, deleted or evicted meanwhile
            return 0
        self.dropped += self._removals.drop_if_damaged(index, key)
        return length_of(entry)
