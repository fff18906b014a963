"""Payload in the stream itself: behind a Put, and behind the reply to a Get."""

import sys
from collections.abc import Sequence
from typing import ClassVar

from infinistore.core.index import NO_CHECKSUM, checksum_of, length_of
from infinistore.errors import DeadlineExceeded, OutOfMemory
from infinistore.keys import check_distinct
from infinistore.protocol.codec import pack_u64
from infinistore.protocol.effects import Exchange, Span
from infinistore.protocol.frame_reader import READ_AHEAD_BYTES
from infinistore.protocol.messages import MISSING, Get, GetReply, Message, Put, PutReply
from infinistore.protocol.server_connection import Received
from infinistore.server.connection import JOINED_BYTES, Conversation, Holdings, too_small
from infinistore.server.movers.base import ConnectionMover, Mover
from infinistore.sizes import in_units

_STORED = PutReply(pack_u64())
_KEPT = PutReply(pack_u64([0]))


class InlineMover(Mover):
    """Available on every connection."""

    name: ClassVar = "inline"
    requests: ClassVar[tuple[type[Message], ...]] = (Put, Get)

    def open(self, conversation: Conversation, holdings: Holdings) -> ConnectionMover:
        """Answer Put and Get on a connection."""
        return _InlineConnection(conversation)


class _InlineConnection(ConnectionMover):
    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._core = conversation.core
        self._connection = conversation.connection
        self._payload: memoryview | None = None  # of a put for which there was no room yet
        self.handlers = {Put: self._put, Get: self._get}
        self.quick = {Put: self._put_single, Get: self._get_single}

    async def _put(self, put: Put, received: Received) -> None:
        """Receive the blocks straight into the pool, or give the room back."""
        conversation = self._conversation
        check_distinct(put.keys)
        conversation.check_lengths(put.keys)
        payload, self._payload = self._payload, None
        if payload is None and len(put.keys) == 1 and not (put.ttl_us or put.since):
            await self._receive(self._connection.gather_payload(), received)
            if (reply := self._put_single(put, received, False)) is not None:
                await conversation.send_answer(reply)
                return
            payload, self._payload = self._payload, None
        reservation = await conversation.reserve(put.sizes, received.deadline_us)
        try:
            trailer = memoryview(pack_u64(bytes(8 * len(put.keys)) if put.checksums else b"")).cast("B")
            views = [*reservation.merged_views, trailer]
            if payload is None:
                await self._receive(self._connection.read_payload(views), received)
            else:
                Span(views).copy_in(payload)
            checksums = trailer.cast("Q").tolist() if put.checksums else None
            skipped = self._core.commit(
                reservation,
                put.keys,
                checksums,
                replace=put.replace,
                free=False,
                ttl_s=put.ttl_us / 1e6,
                since=put.since,
            )
            await conversation.reply(PutReply(pack_u64(skipped)))
        finally:
            self._core.abort(reservation)  # does nothing after a commit
            self._core.free_replaced()

    async def _receive(self, exchange: Exchange[None], received: Received) -> None:
        conversation = self._conversation
        within_s = conversation.limits.transfer_s(received.payload_bytes, received.deadline_us)
        try:
            await conversation.drive(exchange, within_s)
        except TimeoutError:
            left = in_units(self._connection.payload_to_come)
            raise DeadlineExceeded(f"{left} of {in_units(received.payload_bytes)} had not come in time") from None

    def _put_single(self, put: Put, received: Received, at_once: bool) -> Sequence[memoryview] | None:
        """Store one block, all of which has come. What ends at a time, or is a copy, is
        rare, and takes the way of batches; so does what has to wait for room.
        """
        if len(put.keys) != 1 or put.ttl_us or put.since or self._payload is not None:
            return None
        conversation = self._conversation
        conversation.check_lengths(put.keys)
        if (payload := self._connection.take_payload()) is None:
            return None
        length = put.sizes[0]
        checksum = int.from_bytes(payload[length:], sys.byteorder) if put.checksums else NO_CHECKSUM
        try:
            stored = self._core.write_one(
                conversation.client, put.keys[0], payload[:length], checksum, replace=put.replace
            )
        except OutOfMemory:
            if not conversation.may_grow:
                raise
            self._payload = payload
            return None
        return self._connection.begin_reply(_STORED if stored else _KEPT)

    def _get_single(self, get: Get, received: Received, at_once: bool) -> Sequence[memoryview] | None:
        """Read one block that needs no pin: it is sent at once, or copied. One that has
        to be read from disk takes the way of batches."""
        conversation = self._conversation
        if len(get.keys) != 1 or len(get.capacities) > 1:
            return None
        core, key = self._core, get.keys[0]
        entry = core.find_one(conversation.client, key)
        if entry is None and conversation.tiers.waits_for_disk(get.keys):
            return None
        length = 0 if entry is None else length_of(entry)
        if length > (READ_AHEAD_BYTES if at_once else JOINED_BYTES):
            return None
        core.use_one(conversation.client, key, entry)
        if get.capacities and length > get.capacities[0]:
            raise too_small(get, [length])
        checksum = NO_CHECKSUM if entry is None else checksum_of(entry)
        reply = GetReply(pack_u64((length or MISSING,)), pack_u64((checksum,) if get.checksums else ()))
        if entry is None:
            return self._connection.begin_reply(reply)
        conversation.traffic.sent_bytes += length
        sent = self._connection.begin_reply(reply, (self._core.pool.view(entry),))
        return [memoryview(b"".join(sent))] if length <= JOINED_BYTES else sent

    async def _get(self, get: Get, received: Received) -> None:
        """Send the blocks straight from the pool, and pin them meanwhile."""
        conversation = self._conversation
        lease = await conversation.lease(get, received)
        try:
            sizes = [size or MISSING for size in lease.lengths]  # no value is empty: a length of 0 says there is none
            checksums = lease.checksums if get.checksums else ()
            await self._conversation.send_blocks(
                GetReply(pack_u64(sizes), pack_u64(checksums)), lease.merged_views, received
            )
        finally:
            self._core.release(lease)
