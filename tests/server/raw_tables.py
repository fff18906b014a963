"""The tables in shared memory, at the end of a raw client."""

import os
from typing import Any

from infinistore.core.arena import Mapping
from infinistore.protocol.messages import MapTables, MapTablesReply
from infinistore.protocol.shared_tables import CommitWord, HazardTable, RemovalTable, TouchLog
from infinistore.transports.base import drive
from tests.server.running import Peer

__all__ = ["Tables", "map_tables"]


class Tables:
    """The tables of one connection, mapped; the descriptors are closed."""

    def __init__(self, reply: MapTablesReply, descriptors: list[int]) -> None:
        removals, own = (
            Mapping(descriptor, os.fstat(descriptor).st_size, writable=writable).memory
            for descriptor, writable in zip(descriptors, (False, True), strict=True)
        )
        for descriptor in descriptors:
            os.close(descriptor)
        self.reply = reply
        self.numbers: Any = own[:64].cast("Q")
        """The header of the connection's own table."""
        self.removals = RemovalTable(removals, reply.granule_bytes)
        self.hazards = HazardTable(own)
        self.log = TouchLog(own)
        self.word = CommitWord(own)

    @property
    def closed(self) -> bool:
        return self.hazards.closed


async def map_tables(peer: Peer) -> Tables:
    descriptors: list[int] = []
    reply = await drive(peer.connection.request(MapTables(), descriptors=descriptors), peer.stream)
    assert isinstance(reply, MapTablesReply)
    return Tables(reply, descriptors)
