"""Reads of known blocks, over one connection, without a message to the server.

The tables belong to the server (`protocol/shared_tables.py`) and are valid as long as
the connection is open. So a connection with anything in its hazard table stays open
until that is gone, like one with pins.
"""

import os
from collections.abc import Callable, Sequence
from operator import gt, lt
from typing import NamedTuple

from infinistore.client.memory.pins import Pins
from infinistore.client.movers.shm.known_blocks import KnownBlocks, Places
from infinistore.core.arena import Mapping
from infinistore.errors import OutOfMemory, ProtocolError, ServerReplaced, StoreUnavailable
from infinistore.protocol.messages import MapTablesReply, Numbers
from infinistore.protocol.shared_tables import (
    HAZARD_SLOTS,
    LEAST_REMOVAL_TABLE_BYTES,
    READER_BYTES,
    CommitWord,
    HazardTable,
    RemovalTable,
    TouchLog,
)

__all__ = ["KnownReads", "PinnedBlocks", "is_too_long"]


class PinnedBlocks(NamedTuple):
    """A batch that is pinned by this process."""

    places: Numbers
    sizes: Numbers
    checksums: Numbers
    hazard: int
    """What the hazard table needs to unpin it."""


class KnownReads:
    """The reads that one connection makes possible. `pins` are those of the
    connection. `map_memory` maps the tables.
    """

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
        """Note that there are no descriptors for tables: connections to come do not ask
        for them.
        """
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
        """Return whether a batch of so many blocks can be committed without a
        request.
        """
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
