"""Answers to those who follow which keys are removed, and the wait for a removal.

Nothing is kept for a client between two requests. A wait is bounded by what the client
asks for, by its deadline, and by `MAX_WAIT_S`; a session that has to end ends it. A key
is told if it is nowhere when the answer is made: a block that has left memory and is on
disk is there, and so is one that was put again.
"""

import trio

from infinistore.core.removal_log import MAX_TOLD_KEYS
from infinistore.core.store import StoreCore
from infinistore.protocol.messages import MISSING, Keys, Removed, RemovedReply
from infinistore.protocol.server_connection import Received
from infinistore.server.connection.conversation import Conversation

__all__ = ["MAX_WAIT_S", "RemovalWaits"]

MAX_WAIT_S = 10.0
"""How long one request waits at most. A client that has left is noticed then."""
_DEADLINE_SHARE = 0.5
"""The part of the caller's time that a wait may take."""


class RemovalWaits:
    """The answers to `Removed` on one connection."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._core: StoreCore = conversation.core
        self._event: trio.Event | None = None
        self._hurried = False

    def hurry(self) -> None:
        """Wait no longer, now and later: the session is to end."""
        self._hurried = True
        if self._event is not None:
            self._event.set()

    async def answer(self, request: Removed, received: Received) -> None:
        """Reply with what was removed, as soon as something was or the wait is over."""
        wait_s = min(request.wait_us / 1e6, MAX_WAIT_S)
        if received.deadline_us:
            wait_s = min(wait_s, _DEADLINE_SHARE * received.deadline_us / 1e6)
        until = trio.current_time() + wait_s
        reply = self._look(request)
        while not reply.keys and not reply.missed and reply.log == request.log and not self._hurried:
            if reply.number == request.number and not await self._wait(until):
                break
            request = Removed(reply.log, reply.number, request.limit, request.wait_us)
            reply = self._look(request)
        await self._conversation.reply(reply)

    def _look(self, request: Removed) -> RemovedReply:
        core = self._core
        index = core.index  # which ends the keys whose time is over
        disk = self._conversation.disk
        most = min(request.limit, MAX_TOLD_KEYS, core.limits.max_batch_keys)
        told = core.removal_log.told(
            (request.log, request.number), most, index.contains_many if disk is None else disk.exists
        )
        return RemovedReply(*told.place, Keys(told.keys), MISSING if told.missed is None else told.missed)

    async def _wait(self, until: float) -> bool:
        """Wait for a removal, or for the end of a key; False if the time is over."""
        now = trio.current_time()
        if now >= until:
            return False
        retention = self._core.retention
        ends_s = retention.ends[0][0] - retention.clock() if retention.ends else until - now
        self._event = event = trio.Event()
        self._core.removal_log.waiting.append(event.set)
        try:
            with trio.move_on_at(min(until, now + max(ends_s, 0.001))):
                await event.wait()
        finally:
            self._event = None
            self._core.removal_log.stop_waiting(event.set)
        return True
