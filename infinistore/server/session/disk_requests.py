"""The requests that a server with disks answers otherwise than one without.

They say what both tiers have, and wait for disks where they must: `Delete` and `Purge`
until no crash can bring a key back, `Flush` until blocks are durable.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from infinistore.protocol.messages import (
    CountReply,
    Delete,
    Exists,
    ExistsReply,
    Flush,
    MatchPrefix,
    MatchPrefixReply,
    Message,
    Prefetch,
    PrefetchReply,
    Purge,
    ReleaseHold,
)
from infinistore.protocol.server_connection import Received
from infinistore.server.connection import Conversation
from infinistore.server.movers.base import Handler

if TYPE_CHECKING:
    from infinistore.server.disk import DiskService

_IN_STORE = bytes.maketrans(b"\2", b"\1")


class DiskRequests:
    """The requests of one connection."""

    def __init__(self, conversation: Conversation, disk: "DiskService") -> None:
        self._conversation = conversation
        self._core = conversation.core
        self._disk = disk
        self.handlers: Mapping[type[Message], Handler] = {
            Exists: self._exists,
            MatchPrefix: self._match_prefix,
            ReleaseHold: self._release_hold,
            Delete: self._delete,
            Purge: self._purge,
            Flush: self._flush,
            Prefetch: self._prefetch,
        }

    async def _exists(self, request: Exists, received: Received) -> None:
        found = self._disk.exists(request.keys)
        if request.touch:
            self._core.touch(request.keys)
        await self._conversation.reply(ExistsReply(found.translate(_IN_STORE), found.count(2)))

    async def _match_prefix(self, request: MatchPrefix, received: Received) -> None:
        if request.hold_us:
            match = self._disk.hold_prefix(self._conversation.client, request.keys, request.hold_us / 1e6)
        else:
            match = self._disk.match_prefix(request.keys)
        await self._conversation.reply(MatchPrefixReply(match.matched, match.hold_id, match.matched - match.in_memory))

    async def _release_hold(self, request: ReleaseHold, received: Received) -> None:
        await self._conversation.reply(CountReply(int(self._disk.release_hold(request.hold))))

    async def _delete(self, request: Delete, received: Received) -> None:
        await self._conversation.reply(CountReply(await self._disk.delete(request.keys, received.deadline_us)))

    async def _purge(self, request: Purge, received: Received) -> None:
        await self._conversation.reply(CountReply(await self._disk.purge(received.deadline_us)))

    async def _flush(self, request: Flush, received: Received) -> None:
        self._core.limits.check_batch(len(request.keys))
        await self._conversation.reply(CountReply(await self._disk.flush(request.keys, received.deadline_us)))

    async def _prefetch(self, request: Prefetch, received: Received) -> None:
        self._core.limits.check_batch(len(request.keys))
        ahead = self._disk.prefetch(request.keys, request.hold_us / 1e6)
        await self._conversation.reply(PrefetchReply(ahead.reading, ahead.skipped, ahead.hold_id))
