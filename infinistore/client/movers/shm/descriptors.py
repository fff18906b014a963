"""The descriptors that a server hands out over its Unix socket: of arenas, and of its
tables.
"""

import errno
import os
from collections.abc import Sequence
from typing import Final

from infinistore.client.movers.channel import Channel, expect
from infinistore.client.movers.shm.known_blocks import KnownReads
from infinistore.client.movers.shm.mapped_pool import MappedPool
from infinistore.errors import StoreUnavailable
from infinistore.protocol.messages import MapArenas, MapArenasReply, MapTables, MapTablesReply
from infinistore.protocol.versions import Capability

__all__ = ["MAPS_NOTHING", "ask_tables", "learn_arenas", "maps_something"]

MAPS_NOTHING: Final = "the server lets this client map nothing"
_NEEDED_FOR_TABLES = Capability.TABLES | Capability.COMMIT_WORD


async def learn_arenas(channel: Channel, pool: MappedPool, places: Sequence[int] = (0,)) -> None:
    """Ask until all arenas of these places are known, or the server has no more.

    A reply has a bounded number of descriptors. A place in an arena that is not there
    is a ProtocolError for whoever looks at it.
    """
    known = -1
    while known < pool.arena_count and not pool.knows(places):
        known = pool.arena_count
        await ask_arenas(channel, pool)


async def maps_something(channel: Channel, pool: MappedPool) -> bool:
    """Ask for the arenas for the first time; return whether there are any for this
    client. If not, statistics say so.
    """
    await learn_arenas(channel, pool)
    if not pool.arena_count and not pool.closed:
        channel.path = "unix", MAPS_NOTHING
        return False
    return True


async def ask_arenas(channel: Channel, pool: MappedPool) -> None:
    """Ask for the arenas that are not known yet, as many as one reply tells of."""
    first = pool.arena_count
    descriptors: list[int] = []
    try:
        request = channel.connection.request(
            MapArenas(first), deadline_us=channel.remaining_us(), descriptors=descriptors
        )
        reply = expect(MapArenasReply, await request)
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    if descriptors and Capability.LIVENESS_PIPE in channel.connection.peer.capabilities:
        pool.watch(descriptors.pop())
    pool.add(first, reply.lengths, descriptors, writable=reply.writable)


async def ask_tables(channel: Channel, known_reads: KnownReads) -> None:
    """Ask for the tables that let this process read known blocks without asking."""
    known_reads.wants_tables = False
    if _NEEDED_FOR_TABLES not in channel.connection.peer.capabilities:
        return
    descriptors: list[int] = []
    try:
        request = channel.connection.request(MapTables(), deadline_us=channel.remaining_us(), descriptors=descriptors)
        reply = expect(MapTablesReply, await request)
        if reply.granule_bytes:
            known_reads.use(reply, descriptors)
    except StoreUnavailable as error:
        if getattr(error.__cause__, "errno", 0) == errno.EMFILE:
            known_reads.do_without()
        raise
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
