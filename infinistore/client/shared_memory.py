"""The operations over shared memory: blocks are copied from and to the server's pool by the client itself.

A put reserves room, copies and commits; a get leases, copies and releases. What is small goes inline over the socket:
one round trip beats two. A call that is given up between them closes its connection, which gives room and pins back.
"""

import os
from collections.abc import Callable, Sequence

from infinistore.client.copying import copy_blocks
from infinistore.client.mapped_pool import MappedPool
from infinistore.client.operations import Batch, RemoteOperations, Room, expect, present_in, skipped_keys
from infinistore.errors import ProtocolError
from infinistore.protocol.codec import numbers
from infinistore.protocol.connection import ClientConnection, Exchange
from infinistore.protocol.messages import (
    NO_CHECKSUM,
    Commit,
    HelloReply,
    Keys,
    Lease,
    LeaseReply,
    MapArenas,
    MapArenasReply,
    PutReply,
    Release,
    Reserve,
    ReserveReply,
)
from infinistore.protocol.places import arena_of

__all__ = ["SharedMemoryOperations"]


class SharedMemoryOperations(RemoteOperations):
    """The operations over one connection by Unix socket, with the server's pool mapped."""

    def __init__(
        self,
        connection: ClientConnection,
        hello: HelloReply,
        *,
        verify: bool,
        path: tuple[str, str],
        remaining_us: Callable[[], int],
        pool: MappedPool,
        inline_bytes: int,
    ) -> None:
        super().__init__(connection, hello, verify=verify, path=path, remaining_us=remaining_us)
        self.pool = pool
        self._inline_bytes = inline_bytes

    def _put_part(self, batch: Batch, replace: bool) -> Exchange[list[str]]:
        sizes = numbers(map(len, batch.views))
        if sum(sizes) <= self._inline_bytes:
            return (yield from super()._put_part(batch, replace))
        yield from self._know_arenas()
        if not self.pool.writable:
            return (yield from super()._put_part(batch, replace))
        reserved = expect(ReserveReply, (yield from self._ask(Reserve(sizes))))
        self.holding = True
        if len(reserved.places) != len(sizes):
            raise ProtocolError(f"{len(reserved.places)} places for {len(sizes)} blocks")
        yield from self._know_arenas(reserved.places)
        targets = self.pool.views(reserved.places, sizes, writable=True)
        checksums = yield from copy_blocks(batch.views, targets, hash_targets=self._verify)
        commit = Commit(reserved.reservation, Keys(batch.keys), numbers(checksums), replace)
        reply = expect(PutReply, (yield from self._ask(commit)))
        self.holding = False
        return skipped_keys(batch.keys, reply)

    def _get(
        self,
        keys: Sequence[str],
        views: Sequence[memoryview] | None,
        room: Room,
    ) -> Exchange[None]:
        first = 0
        while first < len(keys):
            part = self._key_part(keys, first)
            capacities = () if views is None else map(len, views[first : first + len(part)])
            lease = Lease(part, numbers(capacities), self._inline_bytes)
            reply = expect(LeaseReply, (yield from self._ask(lease)))
            self.holding = bool(reply.lease)
            self._check_reply(lease, reply)
            if len(reply.places) != (len(reply.sizes) if reply.lease else 0):
                raise ProtocolError(f"{len(reply.places)} places for {len(reply.sizes)} blocks")
            targets = room(reply.sizes, first)
            if reply.lease:
                yield from self._copy_out(part, reply, targets)
            else:
                yield from self._read_blocks(part, reply, targets)
            first += len(reply.sizes)

    def _copy_out(self, keys: Keys, reply: LeaseReply, targets: list[memoryview]) -> Exchange[None]:
        there = present_in(reply)
        places = [reply.places[i] for i in there]
        yield from self._know_arenas(places)
        sources = self.pool.views(places, [reply.sizes[i] for i in there], writable=False)
        checksums = yield from copy_blocks(sources, targets, hash_targets=self._verify)
        yield from self._connection.notify(Release(reply.lease))
        self.holding = False
        if self._verify:
            expected = [reply.checksums[i] for i in there]
            bad = [i for i, (e, c) in enumerate(zip(expected, checksums, strict=True)) if e not in (NO_CHECKSUM, c)]
            yield from self._report([keys[there[i]] for i in bad], len(there))

    def _know_arenas(self, places: Sequence[int] = (0,)) -> Exchange[None]:
        """Ask for the arenas that are named and not known yet."""
        first = len(self.pool)
        if not places or arena_of(max(places)) < first:
            return
        descriptors: list[int] = []
        try:
            request = self._connection.request(
                MapArenas(first), deadline_us=self._remaining_us(), descriptors=descriptors
            )
            reply = expect(MapArenasReply, (yield from request))
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        self.pool.add(first, reply.lengths, descriptors, writable=reply.writable)
