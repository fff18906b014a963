"""Blocks that this process has used: where they lie, and reading them without a message
to the server.

A location is valid until its key is removed, which the server's removal table shows;
see `protocol/shared_tables.py` for the order in which to check it. `KnownBlocks` pins
nothing: the reader does that.

`KnownReads` are over one connection. The tables belong to the server and are valid as
long as the connection is open. So a connection with anything in its hazard table stays
open until that is gone, like one with pins.
"""

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import gt, lt
from typing import NamedTuple, TypeAlias

import attrs

from infinistore.client.memory.pins import Pins
from infinistore.core.arena import Mapping
from infinistore.errors import OutOfMemory, ProtocolError, ServerReplaced, StoreUnavailable
from infinistore.protocol.codec import pack_u64
from infinistore.protocol.messages import MISSING, MapTablesReply, Numbers
from infinistore.protocol.shared_tables import (
    HAZARD_SLOTS,
    LEAST_REMOVAL_TABLE_BYTES,
    READER_BYTES,
    CommitWord,
    HazardTable,
    RemovalTable,
    TouchLog,
)

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
        """Return where these blocks lay when noted; None unless known of all."""
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


class PinnedBlocks(NamedTuple):
    """A batch that is pinned by this process."""

    places: Numbers
    sizes: Numbers
    checksums: Numbers
    hazard: int
    """What the hazard table needs to unpin it."""


class KnownReads:
    """The reads that a connection and its `pins` allow; `map_memory` maps tables."""

    def __init__(self, known: KnownBlocks, pins: Pins, map_memory: Callable[..., Mapping] = Mapping) -> None:
        self._known = known
        self._pins = pins
        self._map_memory = map_memory
        self._log: TouchLog | None = None
        self.commit_word: CommitWord | None = None
        self.max_pinned_bytes = 0
        self.unit_bytes = 1
        self.wants_tables = not known.closed
        """Whether to ask the server for its tables."""

    def use(self, reply: MapTablesReply, descriptors: Sequence[int]) -> None:
        """Map the tables that a server sent. The caller still closes the descriptors.

        Without address space for them, reads go on without tables.

        Raises:
            ProtocolError: they are not valid tables.
        """
        lengths = [os.fstat(descriptor).st_size for descriptor in descriptors]
        if len(lengths) != 2 or any(map(lt, lengths, (LEAST_REMOVAL_TABLE_BYTES, READER_BYTES))):
            raise ProtocolError(f"the server's two tables came as {len(lengths)} files, of {lengths} bytes")
        if reply.granule_bytes & (reply.granule_bytes - 1) or not reply.unit_bytes:
            raise ProtocolError(f"the server's tables cannot be used: {reply}")
        try:
            removals, reader = [
                self._map_memory(descriptor, length, writable=writable).memory
                for descriptor, length, writable in zip(descriptors, lengths, (False, True), strict=True)
            ]
        except OutOfMemory:
            return
        self._pins.hazards = HazardTable(reader)
        self._log = TouchLog(reader)
        self.commit_word = CommitWord(reader)
        if self._known.table is None:
            self._known.table = RemovalTable(removals, reply.granule_bytes)
        self.max_pinned_bytes, self.unit_bytes = reply.max_pinned_bytes, reply.unit_bytes

    def do_without(self) -> None:
        """Note that no descriptors are left for tables: ask for none from now on."""
        self._known.close()

    def pin(self, keys: Sequence[str], known: Places) -> PinnedBlocks | None:
        """Pin the known blocks of these keys, inside `with pins.lock` only.

        Returns None if their locations are no longer valid, or too much is pinned
        already.
        """
        hazards = self._pins.hazards
        if hazards is None or (self._pins.leased_bytes and self._is_too_much(known.sizes)):
            return None
        hazard = hazards.add(known.places, known.sizes, known.checksums)
        if hazard is None:
            return None
        if hazards.closed or not self._known.hold(keys, known):
            hazards.remove(hazard)
            return None
        return PinnedBlocks(known.places, known.sizes, known.checksums, hazard)

    def footprint(self, sizes: Sequence[int]) -> int:
        """Return about how much of the pool blocks of these sizes take."""
        unit = self.unit_bytes
        if sizes and sizes.count(sizes[0]) == len(sizes):  # the usual case
            return -(-sizes[0] // unit) * unit * len(sizes)
        return sum(-(-size // unit) for size in sizes) * unit

    def _is_too_much(self, sizes: Numbers) -> bool:
        return self._pins.leased_bytes + self.footprint(sizes) > self.max_pinned_bytes

    def close(self) -> None:
        """Unmap the tables, except those that pinned blocks still need."""
        self._log = self.commit_word = None
        if not self._pins.in_use:
            self._pins.hazards = None

    def unpin(self, read: PinnedBlocks) -> None:
        """Let go of a batch. Inside `with pins.lock` only."""
        assert self._pins.hazards is not None
        self._pins.hazards.remove(read.hazard)

    def log(self, touch: bytes) -> bool:
        """Leave an encoded `Touch` for the server, which reads it when recency matters.

        Returns False if there is no room for it now.
        """
        return self._log is not None and self._log.append(touch)

    def can_commit(self, blocks: int) -> bool:
        """Whether a batch of so many blocks can be committed without a request."""
        return self.commit_word is not None and blocks <= HAZARD_SLOTS

    def commit(self, reservation: int, checksums: Numbers) -> None:
        """Make the blocks of a prepared reservation visible; `checksums` is empty if
        there are none.

        Raises:
            ServerReplaced: the server has ended this connection, and waits for us to do
                so. Nothing is stored.
            StoreUnavailable: it ended it just now. It is not known whether this was
                earlier.
        """
        assert self.commit_word is not None and self._pins.hazards is not None
        if self._pins.hazards.closed:
            raise ServerReplaced("the server has ended the connection before the batch was committed")
        self.commit_word.commit(reservation, checksums)
        if self._pins.hazards.closed:  # it may have looked before: nobody knows
            raise StoreUnavailable("the server ended the connection while the batch was committed")


def is_too_long(known: Places, capacities: Numbers, most_bytes: int) -> bool:
    """Return whether a batch exceeds its buffers, or what the server sends at once."""
    sizes = known.sizes
    return (sizes != capacities and bool(capacities) and any(map(gt, sizes, capacities))) or sum(sizes) > most_bytes
