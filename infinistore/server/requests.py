"""What the server does for each request that moves no payload: a message in, a reply out, nothing awaited.

Put and Get, which move payload, are in `session.py`.
"""

from collections.abc import Callable
from typing import Any

from infinistore.core.clients import Client
from infinistore.core.store import StoreCore
from infinistore.protocol.messages import (
    CountReply,
    Delete,
    Exists,
    ExistsReply,
    Keys,
    KeysReply,
    ListKeys,
    MatchPrefix,
    MatchPrefixReply,
    Message,
    ReleaseHold,
    Reply,
)

__all__ = ["MAX_PAGE_KEYS", "answer"]

MAX_PAGE_KEYS = 10_000


def answer(request: Message, core: StoreCore, client: Client) -> Reply:
    """Do what a request asks for, and return the reply.

    Raises:
        InfiniStoreException: the store refuses.
    """
    return _ANSWERS[type(request)](request, core, client)


def _exists(request: Exists, core: StoreCore, client: Client) -> Reply:
    return ExistsReply(core.exists(request.keys))


def _hold_prefix(request: MatchPrefix, core: StoreCore, client: Client) -> Reply:
    return MatchPrefixReply(*core.hold_prefix(client, request.keys, request.hold_us / 1e6))


def _release_hold(request: ReleaseHold, core: StoreCore, client: Client) -> Reply:
    return CountReply(int(core.release_hold(request.hold)))


def _delete(request: Delete, core: StoreCore, client: Client) -> Reply:
    return CountReply(core.delete(request.keys))


def _list_keys(request: ListKeys, core: StoreCore, client: Client) -> Reply:
    limit = min(request.limit, MAX_PAGE_KEYS)
    return KeysReply(Keys(core.keys(request.prefix, limit, request.after)), limit)


_ANSWERS: dict[type[Message], Callable[[Any, StoreCore, Client], Reply]] = {
    Exists: _exists,
    MatchPrefix: _hold_prefix,
    ReleaseHold: _release_hold,
    Delete: _delete,
    ListKeys: _list_keys,
}
