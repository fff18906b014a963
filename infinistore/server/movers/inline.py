"""Payload in the stream itself: behind a Put, and behind the reply to a Get."""

from typing import ClassVar

from infinistore.errors import DeadlineExceeded
from infinistore.keys import check_distinct
from infinistore.protocol.codec import pack_u64
from infinistore.protocol.messages import MISSING, Get, GetReply, Message, Put, PutReply
from infinistore.protocol.server_connection import Received
from infinistore.server.connection.conversation import Conversation
from infinistore.server.connection.holdings import Holdings
from infinistore.server.movers.base import ConnectionMover, Mover
from infinistore.sizes import in_units

__all__ = ["InlineMover"]


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
        self.handlers = {Put: self._put, Get: self._get}

    async def _put(self, put: Put, received: Received) -> None:
        """Receive the blocks straight into the pool. Whatever interrupts this gives the
        room back.
        """
        conversation = self._conversation
        check_distinct(put.keys)
        conversation.check_lengths(put.keys)
        reservation = await conversation.reserve(put.sizes, received.deadline_us)
        try:
            trailer = memoryview(pack_u64(bytes(8 * len(put.keys)) if put.checksums else b"")).cast("B")
            within_s = conversation.limits.transfer_s(received.payload_bytes, received.deadline_us)
            exchange = self._connection.read_payload([*reservation.merged_views, trailer])
            try:
                await conversation.drive(exchange, within_s)
            except TimeoutError:
                left = in_units(self._connection.payload_left)
                raise DeadlineExceeded(f"{left} of {in_units(received.payload_bytes)} had not come in time") from None
            checksums = trailer.cast("Q").tolist() if put.checksums else None
            skipped = self._core.commit(reservation, put.keys, checksums, replace=put.replace, free=False)
            await conversation.reply(PutReply(pack_u64(skipped)))
        finally:
            self._core.abort(reservation)  # does nothing after a commit
            self._core.free_replaced()

    async def _get(self, get: Get, received: Received) -> None:
        """Send the blocks straight from the pool, and pin them meanwhile."""
        conversation = self._conversation
        count = None if conversation.disk is None else await conversation.fetch(get, received)
        lease = conversation.lease(get, count)
        try:
            sizes = [size or MISSING for size in lease.lengths]  # no value is empty: a length of 0 says there is none
            checksums = lease.checksums if get.checksums else ()
            await self._conversation.send_blocks(
                GetReply(pack_u64(sizes), pack_u64(checksums)), lease.merged_views, received
            )
        finally:
            self._core.release(lease)
