"""Removals: how keys lose their blocks: by deletion, replacement, eviction, damage, or
because their time is over.

A removal has three steps: announce it, scan the hazards, take the keys away and retire
their blocks. The first two call others and may fail; then nothing has changed. The last
one cannot fail, so no space is lost.

Leaves to others: when the space of a retired block is free (`retired`), and which
blocks are evicted (`space`).
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import xxhash

from infinistore.core.deletions import Deletions
from infinistore.core.index import NO_CHECKSUM, Entry, Index, checksum_of, extent_of
from infinistore.core.journal import Change, Journal
from infinistore.core.pins import Retired
from infinistore.core.pool import Pool
from infinistore.core.removal_log import RemovalLog
from infinistore.core.retention import Retention

__all__ = ["Removals"]

_SLICE_KEYS = 4096


class Removals:
    """The removals of one store. Those who call it have an index that is up to date."""

    def __init__(self, pool: Pool, retired: Retired, retention: Retention, journal: Journal | None) -> None:
        self.on_removal: Callable[[Sequence[Entry]], object] | None = None
        """Called with blocks that lose their keys, before their space is used again."""
        self.deleted = 0
        """Keys deleted or purged."""
        self.expired = 0
        """Keys whose time to live was over."""
        self.checksum_drops = 0
        """Blocks dropped because their bytes did not match their checksum."""
        self.log: RemovalLog | None = None
        """What keeps the last removals, while somebody follows them."""
        self.deletions: Deletions | None = None
        """What keeps copies from bringing deleted keys back."""
        self._pool = pool
        self._retired = retired
        self._retention = retention
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
        log = self.log
        gone = index.those_there(keys) if log is not None and log.is_kept else ()
        removed = index.remove(keys)
        self._retention.removed(keys)
        self._retired.add(entries if removed == len(entries) else list(set(entries)), scanned=scanned)
        if log is not None and gone:
            log.note(gone)
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
        entries = list(filter(None, index.get_many(keys)))
        if self.deletions is not None:
            self.deletions.note(keys)
        deleted = self.remove(index, keys, entries)
        self.deleted += deleted
        if self._journal is not None:
            self._journal.append(change, keys, entries)
        return deleted

    def expire(self, index: Index) -> None:
        """Remove the keys whose time to live is over."""
        keys = self._retention.take_due()
        if not keys:
            return
        entries = list(filter(None, index.get_many(keys)))
        try:
            self.expired += self.remove(index, keys, entries)
        except BaseException:
            self._retention.put_back(keys)
            raise
        if self._journal is not None:
            self._journal.append("delete", keys, entries)

    def purge(self, index: Index, max_keys: int | None) -> int:
        """Remove every key, or the coldest `max_keys` of them; return how many."""
        change: Change = "purge" if max_keys is None else "delete"
        self._note_purge()
        return self.delete(index, list(islice(index, max_keys)), change)

    def purge_in_slices(self, up_to_date: Callable[[], Index]) -> Iterator[int]:
        """Remove every key that is there when this begins, a few milliseconds of them
        at a time; yield how many. Keys that come between two slices stay.

        Recency says nothing about what was there: others touch keys in between.
        """
        keys, first = list(up_to_date()), 0
        self._note_purge()
        while first < len(keys):
            some = keys[first : first + self._slice_keys()]
            yield self.delete(up_to_date(), some)
            first += len(some)

    def _note_purge(self) -> None:
        if self.deletions is not None:
            self.deletions.note_all()

    def _slice_keys(self) -> int:
        return _SLICE_KEYS

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
            self._journal.append("drop", [key], [entry])
        return True
