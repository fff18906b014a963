"""Locations of blocks that this process has used, for reads without a request.

A location is valid until its key is removed, which the server's removal table shows;
see `protocol/shared_tables.py` for the order in which to check it. Nothing here pins:
the reader does that.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple, TypeAlias

import attrs

from infinistore.protocol.codec import pack_u64
from infinistore.protocol.messages import MISSING, Numbers
from infinistore.protocol.shared_tables import RemovalTable

__all__ = ["KnownBlocks", "Places"]

_Known: TypeAlias = tuple[int, int, int, int]
"""Place, length in bytes, checksum, and the number of removals at that time."""


class Places(NamedTuple):
    """The last known locations of the blocks of a batch."""

    places: Numbers
    sizes: Numbers
    checksums: Numbers
    removals: Sequence[int]
    """For each block, the number of removals when its location was noted."""
    batch: "_Batch | None" = None
    """The batch, if all locations were noted together."""


@attrs.define(eq=False)
class _Batch:
    keys: Sequence[str]
    places: Numbers
    sizes: Numbers
    checksums: Numbers
    removals: int
    entries: "slice | list[int] | None" = None
    """Their entries in the removal table, once they were looked up."""


class KnownBlocks:
    """The known blocks of one run of a server. Any thread may use it.

    It keeps at most `most` blocks, and at least the `most` / 2 that were used last. A
    batch that was read or written as a whole is also kept as a whole, under its first
    key: often it is requested as a whole again, and one lookup instead of several for
    each block takes a fraction of the time, most of all with cold caches.
    """

    def __init__(self, most: int) -> None:
        self.table: RemovalTable | None = None
        """The server's table; without it, no location can be validated."""
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
        """Note where the blocks of these keys were when there had been so many
        removals; `MISSING` sizes are skipped.

        `removals` is 0 where nobody counts them. The keys must not be changed
        afterwards.
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
        """Return where the blocks of these keys lay when that was noted; None unless it
        is known of all.
        """
        if not keys:
            return None
        batch = self._batches.get(keys[0])
        if batch is not None and batch.keys == keys:
            try:  # noqa: SIM105  # a context manager would be a tenth of what it takes to find one block
                self._batches.move_to_end(keys[0])
            except KeyError:  # another thread may have forgotten it
                pass
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
        return Places(pack_u64(places), pack_u64(sizes), pack_u64(checksums), removals)

    def are_there(self, keys: Sequence[str]) -> bool:
        """Return whether all of these keys are known and have not been removed."""
        found = self.find(keys)
        return found is not None and self.hold(keys, found)

    def hold(self, keys: Sequence[str], found: Places) -> bool:
        """Return whether the locations are still valid; if not, forget these keys."""
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

    def forget_all(self) -> None:
        """Forget every block, so that the server is asked for the next ones."""
        with self._lock:
            self._batches.clear()
            self._batch_blocks = 0
        while self._next_new() is not None:
            pass
        self._recent.clear()
        self._older.clear()

    def close(self) -> None:
        """Forget everything, and note nothing more."""
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
