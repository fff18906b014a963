"""What the server does for each request that moves no payload: a message in, a reply out.

Put and Get, which move payload, and what else is not as simple, are in `session.py`. What takes long is done in slices
(`slices.py`), so that a person who looks at a large store holds nobody up.
"""

from collections.abc import Awaitable, Callable
from itertools import compress
from typing import Any

import trio

from infinistore.core.clients import Client
from infinistore.core.store import StoreCore
from infinistore.protocol.messages import (
    CountReply,
    Delete,
    Evict,
    Exists,
    ExistsReply,
    Keys,
    KeysReply,
    ListKeys,
    Message,
    Purge,
    ReleaseHold,
    Reply,
    Verify,
    VerifyReply,
)
from infinistore.server.slices import evict_in_slices, list_keys_in_slices, purge_in_slices

__all__ = ["ANSWERS", "MAX_PAGE_KEYS"]

MAX_PAGE_KEYS = 10_000
"""The most keys in one answer; clients ask for the next page."""


async def _exists(request: Exists, core: StoreCore, client: Client) -> Reply:
    present = core.exists(request.keys)
    if request.touch:
        core.touch(list(compress(request.keys, present)))
    return ExistsReply(present)


async def _release_hold(request: ReleaseHold, core: StoreCore, client: Client) -> Reply:
    return CountReply(int(core.release_hold(request.hold)))


async def _delete(request: Delete, core: StoreCore, client: Client) -> Reply:
    return CountReply(core.delete(request.keys))


async def _list_keys(request: ListKeys, core: StoreCore, client: Client) -> Reply:
    limit = min(request.limit, MAX_PAGE_KEYS)
    return KeysReply(Keys(await list_keys_in_slices(core, request.prefix, limit, request.after)), limit)


async def _purge(request: Purge, core: StoreCore, client: Client) -> Reply:
    return CountReply(await purge_in_slices(core))


async def _evict(request: Evict, core: StoreCore, client: Client) -> Reply:
    return CountReply(await evict_in_slices(core, request.low, request.high, "manual"))


async def _verify(request: Verify, core: StoreCore, client: Client) -> Reply:
    core.limits.check_batch(len(request.keys))
    sound = bytearray()
    for key in request.keys:
        sound.append(core.verify(key))
        await trio.lowlevel.checkpoint()
    return VerifyReply(bytes(sound))


ANSWERS: dict[type[Message], Callable[[Any, StoreCore, Client], Awaitable[Reply]]] = {
    Exists: _exists,
    ReleaseHold: _release_hold,
    Delete: _delete,
    ListKeys: _list_keys,
    Purge: _purge,
    Evict: _evict,
    Verify: _verify,
}
"""What does what a request asks for, and returns the reply. `InfiniStoreException`, `ValueError`: the store refuses."""
