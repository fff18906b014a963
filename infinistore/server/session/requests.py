"""Roles, movers and removals: who may make a request, the movers that answer those with
payload, and the wait for removals. The other answers are those of any store
(`infinistore.answers`).

For those who follow removals, nothing is kept between two requests: a wait is bounded
by the time that the client asks for, by its deadline, and by `MAX_WAIT_S`.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import trio

from infinistore.access.identity import ALL_ROLES, Identity, Proof, Role
from infinistore.answers import removals
from infinistore.core.store import StoreCore
from infinistore.errors import InfiniStoreException, LimitExceeded, PermissionDenied
from infinistore.protocol import messages
from infinistore.protocol.messages import (
    ONE_WAY,
    FollowRemovals,
    Message,
)
from infinistore.protocol.server_connection import Received
from infinistore.server.connection import Conversation, Holdings
from infinistore.server.movers.base import ConnectionMover, Handler, Mover

MAX_WAIT_S = 10.0
"""How long one request waits at most. A client that has left is noticed then."""
_DEADLINE_SHARE = 0.5
"""The part of the caller's time that a wait may take."""


class RemovalWaits:
    """The answers to `FollowRemovals` on one connection."""

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

    async def answer(self, request: FollowRemovals, received: Received) -> None:
        """Reply with what was removed, as soon as something was or the wait is over."""
        wait_s = min(request.wait_us / 1e6, MAX_WAIT_S)
        if received.deadline_us:
            wait_s = min(wait_s, _DEADLINE_SHARE * received.deadline_us / 1e6)
        until = trio.current_time() + wait_s
        reply = removals(request, self._conversation.tiers)
        while not reply.keys and not reply.missed and reply.log == request.log and not self._hurried:
            if reply.number == request.number and not await self._wait(until):
                break
            request = FollowRemovals(reply.log, reply.number, request.limit, request.wait_us)
            reply = removals(request, self._conversation.tiers)
        await self._conversation.reply(reply)

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


_READ: Final = frozenset((Role.READ,))
_WRITE: Final = frozenset((Role.WRITE,))
_EITHER: Final = _READ | _WRITE
_MONITOR: Final = frozenset((Role.MONITOR,))
_ADMIN: Final = frozenset((Role.ADMIN,))

ROLES: Final[Mapping[type[Message], frozenset[Role]]] = {
    messages.Hello: ALL_ROLES,
    messages.Put: _WRITE,
    messages.Get: _READ,
    messages.Exists: _READ,
    messages.MatchPrefix: _READ,
    messages.ReleaseHold: _READ,
    messages.Delete: _WRITE,
    messages.ListKeys: _READ,
    messages.Purge: _ADMIN,
    messages.Evict: _ADMIN,
    messages.Statistics: _MONITOR,
    messages.Verify: _READ,
    messages.Flush: _WRITE,
    messages.Prefetch: _READ,
    messages.Pin: _WRITE,  # it takes room from everybody
    messages.TimesLeft: _READ,
    messages.FollowRemovals: _READ,
    messages.Mark: _WRITE,
    messages.MapArenas: ALL_ROLES,  # for writing only with WRITE, and none without READ
    messages.MapTables: _EITHER,
    messages.Reserve: _WRITE,
    messages.Commit: _WRITE,
    messages.Prepare: _WRITE,
    messages.Lease: _READ,
    messages.Release: ALL_ROLES,  # giving back needs no role: one may have been taken away meanwhile
    messages.Abort: ALL_ROLES,
    messages.Touch: _READ,
    messages.TakeOver: _ADMIN,
    messages.RdmaConnect: _EITHER,
    messages.RdmaPut: _WRITE,
    messages.RdmaGet: _READ,
    messages.RdmaFill: _WRITE,
    messages.RdmaFetch: _READ,
}
"""The roles for each request; one of them suffices."""


OF_OPERATORS: Final = frozenset((messages.TakeOver,))
"""The requests that concern the whole server, whatever the role: for operators only."""
_OF_SUCCESSORS: Final = frozenset((messages.Hello, messages.TakeOver))


def refusals(identity: Identity) -> dict[type[Message], Handler]:
    """Return a handler for each request that somebody may not make."""
    if identity.proof is Proof.SUCCESSOR:
        refused = ROLES.keys() - _OF_SUCCESSORS
    else:
        refused = {
            kind
            for kind, roles in ROLES.items()
            if not roles & identity.roles or (kind in OF_OPERATORS and not identity.operator)
        }
    return {kind: _ignore if kind in ONE_WAY else _refusal(identity, kind) for kind in refused}


def _refusal(identity: Identity, kind: type[Message]) -> Handler:
    role = min(ROLES[kind], key=lambda role: role.value)

    async def refuse(message: Message, received: Received) -> None:
        identity.check(role, kind.__name__)
        raise PermissionDenied(
            f"{kind.__name__} is for operators, and tenant {identity.tenant} is none; the operator of the server adds "
            "operator: true in the tenants file"
        )

    return refuse


async def _ignore(message: Message, received: Received) -> None:
    """What has no reply can be refused only by doing nothing."""


async def refuse_too_many_keys(message: Any, received: Received) -> None:
    """Handle `TooManyKeys`."""
    raise LimitExceeded(message.why)


async def _refuse(error: type[InfiniStoreException], why: str, message: Message, received: Received) -> None:
    raise error(f"{type(message).__name__}: {why}")


def open_movers(
    movers: Sequence[Mover], conversation: Conversation, holdings: Holdings
) -> tuple[list[ConnectionMover], dict[type[Message], Handler]]:
    """Open the movers that are available on a connection; return them, and what handles
    each request.

    The first mover in order that handles a request gets it. A request that none of them
    handles is refused with the reason of the first mover that knows it.
    """
    opened: list[ConnectionMover] = []
    handlers: dict[type[Message], Handler] = {}
    refused: dict[type[Message], Handler] = {}
    try:
        for mover in movers:
            why = mover.unavailable(conversation)
            if why:
                for kind in mover.requests:
                    refused.setdefault(kind, partial(_refuse, mover.refusal, why))
                continue
            one = mover.open(conversation, holdings)
            opened.append(one)
            for kind, handler in one.handlers.items():
                handlers.setdefault(kind, handler)
    except BaseException:
        for one in opened:
            one.close()
        raise
    return opened, {**refused, **handlers}
