"""Which mover answers which request on one connection."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from infinistore.errors import InfiniStoreException, LimitExceeded
from infinistore.protocol.messages import Message
from infinistore.protocol.server_connection import Received
from infinistore.server.connection.conversation import Conversation
from infinistore.server.connection.holdings import Holdings
from infinistore.server.movers.base import ConnectionMover, Handler, Mover

__all__ = ["open_movers", "refuse_too_many_keys"]


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
    refusals: dict[type[Message], Handler] = {}
    try:
        for mover in movers:
            why = mover.unavailable(conversation)
            if why:
                for kind in mover.requests:
                    refusals.setdefault(kind, partial(_refuse, mover.refusal, why))
                continue
            one = mover.open(conversation, holdings)
            opened.append(one)
            for kind, handler in one.handlers.items():
                handlers.setdefault(kind, handler)
    except BaseException:
        for one in opened:
            one.close()
        raise
    return opened, {**refusals, **handlers}


async def refuse_too_many_keys(message: Any, received: Received) -> None:
    """Handle `TooManyKeys`."""
    raise LimitExceeded(message.why)


async def _refuse(error: type[InfiniStoreException], why: str, message: Message, received: Received) -> None:
    raise error(f"{type(message).__name__}: {why}")
