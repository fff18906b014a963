"""Where blocks lie that this process has read or written: so it reads them again without asking the server.

What is known of a block holds until its key is removed, which the server's removal table tells; see
`protocol/shared_tables.py` for the order in which it has to be asked. Nothing here pins: who reads does that.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import repeat
from typing import NamedTuple, TypeAlias

import attrs

from infinistore.protocol.codec import numbers
from infinistore.protocol.messages import MISSING, Numbers
from infinistore.protocol.shared_tables import RemovalTable

__all__ = ["KnownBlocks", "Places"]

_Known: TypeAlias = tuple[int, int, int, int]
"""Place, length in bytes, checksum, and how many removals there had been when that was so."""


class Places(NamedTuple):
    """Where the blocks of a batch are known to have been."""

    places: Numbers
    sizes: Numbers
    checksums: Numbers
    removals: Sequence[int]
    """For each, how many removals there had been when that was so."""
    batch: "_Batch | None" = None
    """Where all of that was noted together."""


@attrs.define(eq=False)
class _Batch:
    keys: Sequence[str]
    places: Numbers
    sizes: Numbers
    checksums: Numbers
    removals: int
    entries: "slice | list[int] | None" = None
    """Those of the removal table, once it was looked at."""


class KnownBlocks:
    """What is known of the blocks of one run of a server. Any thread may use it.

    It keeps at least the `most` / 2 that were used last, and at most `most`. A batch that was read or written as a
    whole is kept as such, too, and found by its first key: often it is asked for as a whole again, and to look at one
    thing instead of several for each block takes a fraction of the time, most of all when nothing is in the cache.
    """

    def __init__(self, most: int) -> None:
        self.table: RemovalTable | None = None
        """The server's; without it nothing can be said."""
        self.closed = False
        self._most = most
        self._recent: dict[str, _Known] = {}
        self._older: dict[str, _Known] = {}
        self._new: deque[_Batch] = deque()  # those that nobody has asked for otherwise than as a whole
        self._new_blocks = 0
        self._batches: OrderedDict[str, _Batch] = OrderedDict()  # by their first key
        self._batch_blocks = 0
        self._lock = threading.Lock()  # for changing the last two together

    def note(self, keys: Sequence[str], places: Numbers, sizes: Numbers, checksums: Numbers, removals: int) -> None:
        """Note where the blocks of these keys were when there had been so many removals; `MISSING` sizes are skipped.

        `removals` is 0 where nobody counts them. The keys must not be changed afterwards.
        """
        if not removals or not self._most or not keys:
            return
        batch = _Batch(keys, places, sizes, checksums, removals)
        self._new.append(batch)
        self._new_blocks += len(keys)
        while self._new_blocks > self._most and len(self._new) > 1:
            self._next_new()
        if len(sizes) == len(keys) and MISSING not in sizes:
            self._keep_batch(batch)
        else:
            self._forget_batch(keys[0])

    def find(self, keys: Sequence[str]) -> Places | None:
        """Return where the blocks of these keys lay when that was noted; None unless it is known of all."""
        if not keys:
            return None
        batch = self._batches.get(keys[0])
        if batch is not None and batch.keys == keys:
            with suppress(KeyError):  # another thread may have forgotten it
                self._batches.move_to_end(keys[0])
            return Places(batch.places, batch.sizes, batch.checksums, (batch.removals,), batch)
        if self._new:
            self._take_in()
        found = list(map(self._recent.get, keys))
        if not all(found):
            if not self._older:
                return None
            older = self._older
            found = [known or older.get(key) for key, known in zip(keys, found, strict=True)]
            if not all(found):
                return None
            self._add(keys, found)
        places, sizes, checksums, removals = zip(*found, strict=True)
        return Places(numbers(places), numbers(sizes), numbers(checksums), removals)

    def are_there(self, keys: Sequence[str]) -> bool:
        """Whether all of these keys are known, and have not been removed."""
        found = self.find(keys)
        return found is not None and self.hold(keys, found)

    def hold(self, keys: Sequence[str], found: Places) -> bool:
        """Whether what was found holds now; if not, forget these keys."""
        table = self.table
        if table is None:
            return False
        batch = found.batch
        if batch is None:
            if table.is_unchanged(found.places, found.removals):
                return True
        else:
            if batch.entries is None:
                batch.entries = table.entries_of(batch.places)
            if table.are_unchanged(batch.entries, batch.removals):
                return True
            self._forget_batch(keys[0])
        for key in keys:
            self._recent.pop(key, None)
            self._older.pop(key, None)
        return False

    def close(self) -> None:
        """Know nothing any more."""
        self._most = 0
        self.table = None
        self.closed = True

    def _take_in(self) -> None:
        while (batch := self._next_new()) is not None:
            keys = batch.keys
            known = list(zip(batch.places, batch.sizes, batch.checksums, repeat(batch.removals)))  # the last has no end
            if MISSING in batch.sizes:
                there = [i for i, size in enumerate(batch.sizes) if size != MISSING]
                keys, known = [keys[i] for i in there], [known[i] for i in there]
            self._add(keys, known)

    def _next_new(self) -> _Batch | None:
        try:
            batch = self._new.popleft()
        except IndexError:  # another thread had it
            return None
        self._new_blocks -= len(batch.keys)
        return batch

    def _keep_batch(self, batch: _Batch) -> None:
        with self._lock:
            before = self._batches.pop(batch.keys[0], None)
            self._batches[batch.keys[0]] = batch
            self._batch_blocks += len(batch.keys) - (0 if before is None else len(before.keys))
            while self._batch_blocks > self._most and len(self._batches) > 1:
                self._batch_blocks -= len(self._batches.popitem(last=False)[1].keys)

    def _forget_batch(self, first_key: str) -> None:
        with self._lock:
            batch = self._batches.pop(first_key, None)
            if batch is not None:
                self._batch_blocks -= len(batch.keys)

    def _add(self, keys: Sequence[str], known: Sequence[_Known | None]) -> None:
        # A reply may have told of the first keys only; and none is None.
        self._recent.update(zip(keys, known, strict=False))  # type: ignore[arg-type]
        if len(self._recent) > self._most // 2:
            self._older, self._recent = self._recent, {}
