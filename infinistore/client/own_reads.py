"""Reads of blocks that this process knows, over one connection, without a word to the server.

The tables that it takes are the server's (`protocol/shared_tables.py`), and mean something as long as the connection
is open. So a connection whose hazard table has anything in it is not closed before that is gone, like one with pins.
"""

import os
from collections.abc import Sequence
from operator import gt, lt
from typing import NamedTuple

from infinistore.client.known_blocks import KnownBlocks, Places
from infinistore.client.pins import Pins
from infinistore.core.arena import Mapping
from infinistore.errors import OutOfMemory, ProtocolError, StoreUnavailable
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

__all__ = ["OwnRead", "OwnReads", "is_too_long"]


class OwnRead(NamedTuple):
    """A batch that is pinned by this process."""

    places: Numbers
    sizes: Numbers
    checksums: Numbers
    hazard: int
    """What its hazard table wants to let go of it."""


class OwnReads:
    """The reads that one connection makes possible. `pins` are those of the connection."""

    def __init__(self, known: KnownBlocks, pins: Pins) -> None:
        self._known = known
        self._pins = pins
        self._log: TouchLog | None = None
        self._commit_word: CommitWord | None = None
        self._most_bytes = 0
        self._unit_bytes = 1
        self.wants_tables = not known.closed
        """Whether to ask the server for its tables."""

    def use(self, reply: MapTablesReply, descriptors: Sequence[int]) -> None:
        """Map the tables that a server has sent; the descriptors stay the caller's to close.

        Without address space for them, there are none. ProtocolError: they are not what they should be.
        """
        lengths = [os.fstat(descriptor).st_size for descriptor in descriptors]
        if len(lengths) != 2 or any(map(lt, lengths, (LEAST_REMOVAL_TABLE_BYTES, READER_BYTES))):
            raise ProtocolError(f"the server's two tables came as {len(lengths)} files, of {lengths} bytes")
        if reply.granule_bytes & (reply.granule_bytes - 1) or not reply.unit_bytes:
            raise ProtocolError(f"the server's tables cannot be used: {reply}")
        try:
            removals, reader = [
                Mapping(descriptor, length, writable=writable).memory
                for descriptor, length, writable in zip(descriptors, lengths, (False, True), strict=True)
            ]
        except OutOfMemory:
            return
        self._pins.hazards = HazardTable(reader)
        self._log = TouchLog(reader)
        self._commit_word = CommitWord(reader)
        if self._known.table is None:
            self._known.table = RemovalTable(removals, reply.granule_bytes)
        self._most_bytes, self._unit_bytes = reply.max_pinned_bytes, reply.unit_bytes

    def pin(self, keys: Sequence[str], known: Places) -> OwnRead | None:
        """Pin what is known of these keys; None if that does not hold any more, or too much is pinned already.

        Inside `with pins` only.
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
        return OwnRead(known.places, known.sizes, known.checksums, hazard)

    def footprint(self, sizes: Sequence[int]) -> int:
        """What blocks of these sizes count for: about what they take of the pool."""
        unit = self._unit_bytes
        if sizes and sizes.count(sizes[0]) == len(sizes):  # nearly always
            return -(-sizes[0] // unit) * unit * len(sizes)
        return sum(-(-size // unit) for size in sizes) * unit

    def _is_too_much(self, sizes: Numbers) -> bool:
        return self._pins.leased_bytes + self.footprint(sizes) > self._most_bytes

    def close(self) -> None:
        """Let go of the tables, but for what is pinned."""
        self._log = self._commit_word = None
        if not self._pins.in_use:
            self._pins.hazards = None

    def unpin(self, read: OwnRead) -> None:
        """Let go of a batch. Inside `with pins` only."""
        assert self._pins.hazards is not None
        self._pins.hazards.remove(read.hazard)

    def log(self, touch: bytes) -> bool:
        """Leave an encoded `Touch` for the server, which looks at it when recency matters; False if there is no room
        for it now."""
        return self._log is not None and self._log.append(touch)

    def can_commit(self, blocks: int) -> bool:
        """Whether this process can commit a batch of so many blocks by itself."""
        return self._commit_word is not None and blocks <= HAZARD_SLOTS

    def commit(self, reservation: int, checksums: Numbers) -> None:
        """Make the blocks of a prepared reservation visible; `checksums` is empty if there are none.

        Raises:
            StoreUnavailable: the server has ended this connection, and waits for us to do so. Nothing is stored.
        """
        assert self._commit_word is not None and self._pins.hazards is not None
        if self._pins.hazards.closed:
            raise StoreUnavailable("the server has ended the connection before the batch was committed")
        self._commit_word.commit(reservation, checksums)


def is_too_long(known: Places, capacities: Numbers, most_bytes: int) -> bool:
    """Whether a batch does not fit the room there is for it, or is more than the server sends at once."""
    sizes = known.sizes
    return (sizes != capacities and bool(capacities) and any(map(gt, sizes, capacities))) or sum(sizes) > most_bytes
