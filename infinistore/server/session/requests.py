"""The requests that move no payload: each is a function from a message to a reply.

Movers answer the requests that move payload, `session.py` the few that fit neither.
Long work is done in slices (`infinistore/server/maintenance.py`), so that
it delays no other client for long.
"""

import math
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from infinistore.core.clients import Client
from infinistore.core.store import StoreCore
from infinistore.protocol.codec import pack_u64
from infinistore.protocol.messages import (
    MISSING,
    CountReply,
    Delete,
    Evict,
    Flush,
    Keys,
    KeysReply,
    ListKeys,
    Mark,
    Message,
    Pin,
    PinReply,
    Prefetch,
    PrefetchReply,
    Purge,
    ReleaseHold,
    Reply,
    TimesLeft,
    TimesLeftReply,
    Verify,
    VerifyReply,
)
from infinistore.server.maintenance import evict_incrementally, list_keys_incrementally, purge_incrementally

__all__ = ["ANSWERS", "MAX_PAGE_KEYS"]

MAX_PAGE_KEYS = 10_000
"""The most keys in one reply; clients ask for the next page."""


async def _release_hold(request: ReleaseHold, core: StoreCore, client: Client) -> Reply:
    return CountReply(int(core.release_hold(request.hold)))


async def _delete(request: Delete, core: StoreCore, client: Client) -> Reply:
    return CountReply(core.delete(request.keys))


async def _flush(request: Flush, core: StoreCore, client: Client) -> Reply:
    core.limits.check_batch(len(request.keys))
    return CountReply(0)  # without a disk, nothing is durable


async def _prefetch(request: Prefetch, core: StoreCore, client: Client) -> Reply:
    core.limits.check_batch(len(request.keys))
    hold = core.hold_prefix(client, request.keys, request.hold_us / 1e6)[1] if request.hold_us else 0
    return PrefetchReply(0, hold=hold)


async def _pin(request: Pin, core: StoreCore, client: Client) -> Reply:
    kept, keys = core.retention, request.keys
    return PinReply(kept.protect(keys, request.ttl_us / 1e6) if request.pinned else kept.unprotect(keys))


async def _times_left(request: TimesLeft, core: StoreCore, client: Client) -> Reply:
    left = core.retention.times_left(request.keys)
    return TimesLeftReply(
        pack_u64(0 if time_s is None else math.ceil(time_s * 1e6) if time_s else MISSING for time_s in left)
    )


async def _mark(request: Mark, core: StoreCore, client: Client) -> Reply:
    return CountReply(core.deletions.mark(ends_earlier=request.ends_earlier))


async def _list_keys(request: ListKeys, core: StoreCore, client: Client) -> Reply:
    limit = min(request.limit, MAX_PAGE_KEYS)
    return KeysReply(Keys(await list_keys_incrementally(core, request.prefix, limit, request.after)), limit)


async def _purge(request: Purge, core: StoreCore, client: Client) -> Reply:
    return CountReply(await purge_incrementally(core))


async def _evict(request: Evict, core: StoreCore, client: Client) -> Reply:
    return CountReply(await evict_incrementally(core, request.low, request.high, "manual"))


async def _verify(request: Verify, core: StoreCore, client: Client) -> Reply:
    core.limits.check_batch(len(request.keys))
    sound = bytearray()
    for key in request.keys:
        sound.append(core.verify(key))
        await trio.lowlevel.checkpoint()
    return VerifyReply(bytes(sound))


ANSWERS: dict[type[Message], Callable[[Any, StoreCore, Client], Awaitable[Reply]]] = {
    ReleaseHold: _release_hold,
    Delete: _delete,
    Flush: _flush,
    Prefetch: _prefetch,
    Pin: _pin,
    TimesLeft: _times_left,
    Mark: _mark,
    ListKeys: _list_keys,
    Purge: _purge,
    Evict: _evict,
    Verify: _verify,
}
"""The function for each request.

Raises:
    InfiniStoreException: the store refuses the request.
    ValueError: the same.
"""
