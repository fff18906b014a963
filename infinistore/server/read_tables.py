"""The tables by which clients on this host read blocks that they know without asking (`protocol/shared_tables.py`).

There is one removal table for the server, which the core tells of every block that loses its key, and a hazard table
for each connection that asks for one, which the core looks at before it uses room again.
"""

import struct
from collections.abc import Callable

from infinistore.core.arena import Arena, create_arena
from infinistore.core.clients import Client, OwnRead
from infinistore.core.store import StoreCore
from infinistore.errors import InfiniStoreException, ProtocolError
from infinistore.protocol.codec import HEADER_BYTES, decode_body, head_bytes, parse_header
from infinistore.protocol.messages import Message, Touch
from infinistore.protocol.places import places_of
from infinistore.protocol.shared_tables import (
    READER_BYTES,
    CommitWord,
    Hazards,
    RemovalTable,
    TouchLog,
    granule_bytes_for,
    removal_table_bytes,
)

__all__ = ["OwnReads", "ReadTables"]


class ReadTables:
    """The removal table of a server. Blocking to make: some milliseconds. OutOfMemory: there is no memory for it."""

    def __init__(self, pool_bytes: int, unit_bytes: int = 1) -> None:
        self.granule_bytes = granule_bytes_for(pool_bytes, unit_bytes)
        self._arena = create_arena(0, removal_table_bytes(pool_bytes, unit_bytes), name="removals")
        self._removals = RemovalTable(self._arena.memory, self.granule_bytes)
        self._removals.note(())  # counts begin at 1: replies say 0 where there is no table

    @property
    def removals(self) -> int:
        """How many removals there have been."""
        return self._removals.count

    def watch(self, core: StoreCore) -> None:
        """Note what is removed from a store from now on."""
        core.on_removal = lambda entries: self._removals.note(places_of(entries))

    def share(self) -> int:
        """Return the descriptor of the table, for clients to map and read; it stays the table's to close."""
        return self._arena.share(writable=False)

    def close(self) -> None:
        """Close it. Clients that have it mapped keep what it says."""
        self._arena.close()


class OwnReads:
    """What the client of one connection reads by itself: hazard table and touch log. Blocking to make: a fraction of a
    millisecond. OutOfMemory, OSError: there is no memory, or no descriptor, for it."""

    def __init__(self) -> None:
        self._arena: Arena = create_arena(0, READER_BYTES, name="reader")
        self._hazards = Hazards(self._arena.memory)
        self._log = TouchLog(self._arena.memory)
        self.commit_word = CommitWord(self._arena.memory)
        self._hear: Callable[[Message], object] | None = None

    def watch(self, core: StoreCore, client: Client, hear: Callable[[Message], object]) -> None:
        """Have the client's own pins respected from now on, and what it used told to `hear`."""
        self._hear = hear
        core.let_read(client, self._look)

    def listen(self) -> None:
        """Tell what the client has used since the last time. A log that is not written as it should be is told of up to
        there, and never looked at again."""
        if self._hear is None:
            return
        try:
            data = self._log.take()
            start = 0
            while start < len(data):
                view = memoryview(data)[start:]
                header = parse_header(view, max_body_bytes=len(data), max_payload_bytes=0)
                if header.kind != Touch.KIND:
                    raise ProtocolError("a touch log is made of Touch")
                touch = decode_body(header.kind, view[HEADER_BYTES : HEADER_BYTES + header.body_bytes])
                start += head_bytes(header.body_bytes)
                self._hear(touch)
        except (InfiniStoreException, struct.error):
            self._hear = None

    def _look(self) -> list[OwnRead]:
        self.listen()
        return self._hazards.look()

    def share(self) -> int:
        """Return the descriptor of both tables, for the client to write; it stays the tables' to close."""
        return self._arena.share(writable=True)

    def end(self) -> None:
        """Let the client begin no more reads. Those that have begun go on."""
        self._hazards.close()

    def close(self) -> None:
        """Close the table."""
        self._arena.close()
