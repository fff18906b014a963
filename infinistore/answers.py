"""The answers of a store to requests without payload: to clients of a server, and to
callers of an embedded store.

An answer takes the request, the store, who asks, and how many seconds it may wait for
disks. It is the reply; or, if it waits or takes long, the steps to the reply, which
server and embedded store take in their own ways.

What follows a removal waits for one, which both do for themselves: `removals` is what
they look at.
"""

from collections.abc import Callable, Mapping
from itertools import compress
from math import ceil
from typing import Any, Final, TypeAlias

from infinistore.core.clients import Client
from infinistore.core.index import first_keys
from infinistore.core.removals import MAX_TOLD_KEYS, SLICE_KEYS
from infinistore.core.space import EvictionCause
from infinistore.core.store import StoreCore
from infinistore.disk.tiers import Steps, Tiers
from infinistore.protocol.codec import pack_u64
from infinistore.protocol.messages import (
    MISSING,
    CountReply,
    Delete,
    Evict,
    Exists,
    ExistsReply,
    Flush,
    FollowRemovals,
    FollowRemovalsReply,
    Keys,
    KeysReply,
    ListKeys,
    Mark,
    MatchPrefix,
    MatchPrefixReply,
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

Answer: TypeAlias = Callable[[Any, Tiers, Client, float], Reply | Steps[Reply]]
_OF_ONE_KEY = ExistsReply(b"\0"), ExistsReply(b"\1"), ExistsReply(b"\1", 1)
_IN_STORE = bytes.maketrans(b"\2", b"\1")


def exists(request: Exists, tiers: Tiers, client: Client, within_s: float) -> ExistsReply:
    """Tell which keys are there."""
    where = tiers.exists(request.keys)
    if request.touch:
        tiers.core.touch(list(compress(request.keys, where)))
    if len(where) == 1:
        return _OF_ONE_KEY[where[0]]
    on_disk = where.count(2)
    return ExistsReply(where.translate(_IN_STORE) if on_disk else where, on_disk)


def match_prefix(
    request: MatchPrefix, tiers: Tiers, client: Client, within_s: float, *, touch: bool = True
) -> MatchPrefixReply:
    """Count the leading keys that are there; hold them, or touch them."""
    if request.hold_us:
        found = tiers.hold_prefix(client, request.keys, request.hold_us / 1e6)
    else:
        found = tiers.match_prefix(request.keys, touch=touch)
    return MatchPrefixReply(found.matched, found.hold_id, found.matched - found.in_memory)


def _release_hold(request: ReleaseHold, tiers: Tiers, client: Client, within_s: float) -> CountReply:
    return CountReply(int(tiers.release_hold(request.hold)))


def _prefetch(request: Prefetch, tiers: Tiers, client: Client, within_s: float) -> PrefetchReply:
    tiers.core.limits.check_batch(len(request.keys))
    ahead = tiers.prefetch(client, request.keys, request.hold_us / 1e6)
    return PrefetchReply(ahead.reading, ahead.skipped, ahead.hold_id)


def _flush(request: Flush, tiers: Tiers, client: Client, within_s: float) -> Steps[Reply]:
    tiers.core.limits.check_batch(len(request.keys))
    return CountReply((yield from tiers.flush(request.keys, within_s)))


def _delete(request: Delete, tiers: Tiers, client: Client, within_s: float) -> Steps[Reply]:
    return CountReply((yield from tiers.delete(request.keys, within_s)))


def _purge(request: Purge, tiers: Tiers, client: Client, within_s: float) -> Steps[Reply]:
    return CountReply((yield from tiers.purge(within_s)))


def _evict(request: Evict, tiers: Tiers, client: Client, within_s: float) -> Steps[Reply]:
    return CountReply((yield from evict_in_steps(tiers.core, request.low, request.high, "manual")))


def _list_keys(request: ListKeys, tiers: Tiers, client: Client, within_s: float) -> Steps[Reply]:
    limit = min(request.limit, tiers.core.limits.max_page_keys)
    keys = tiers.core.all_keys()
    page: list[str] = []
    first = 0
    while first < len(keys):
        count = max(SLICE_KEYS, len(page))  # so that a long page is not merged with many short slices
        found = first_keys(keys[first : first + count], request.prefix, limit, request.after)
        page = sorted([*page, *found])[:limit]
        first += count
        yield None
    return KeysReply(Keys(page), limit)


def _pin(request: Pin, tiers: Tiers, client: Client, within_s: float) -> PinReply:
    retention, keys = tiers.core.retention, request.keys
    return PinReply(retention.protect(keys, request.ttl_us / 1e6) if request.pinned else retention.unprotect(keys))


def _times_left(request: TimesLeft, tiers: Tiers, client: Client, within_s: float) -> TimesLeftReply:
    left = tiers.core.retention.times_left(request.keys)
    return TimesLeftReply(
        pack_u64(0 if time_s is None else ceil(time_s * 1e6) if time_s else MISSING for time_s in left)
    )


def _mark(request: Mark, tiers: Tiers, client: Client, within_s: float) -> CountReply:
    return CountReply(tiers.core.deletions.mark(ends_earlier=request.ends_earlier))


def _verify(request: Verify, tiers: Tiers, client: Client, within_s: float) -> Steps[Reply]:
    core = tiers.core
    core.limits.check_batch(len(request.keys))
    sound = bytearray()
    for key in request.keys:
        sound.append(core.verify(key))
        yield None
    return VerifyReply(bytes(sound))


ANSWERS: Final[Mapping[type[Message], Answer]] = {
    Exists: exists,
    MatchPrefix: match_prefix,
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
"""The answer to each request.

Raises:
    InfiniStoreException: the store refuses the request.
    ValueError: the same.
"""


def removals(request: FollowRemovals, tiers: Tiers) -> FollowRemovalsReply:
    """Return what was removed. A key that is on disk, or was put again, is there."""
    core = tiers.core
    core.commit_written()  # which ends the keys whose time is over
    most = min(request.limit, MAX_TOLD_KEYS, core.limits.max_batch_keys)
    told = core.removal_log.told((request.log, request.number), most, tiers.exists)
    return FollowRemovalsReply(*told.place, Keys(told.keys), MISSING if told.missed is None else told.missed)


def evict_in_steps(core: StoreCore, low: float, high: float, cause: EvictionCause) -> Steps[int]:
    """If more than `high` of the pool is used, evict until at most `low` is; return how
    many blocks.

    Raises:
        ValueError: not 0 <= low <= high <= 1.
    """
    evicted = count = core.evict(low, high, cause, max_blocks=SLICE_KEYS)
    while count:
        yield None
        count = core.evict(low, low, cause, max_blocks=SLICE_KEYS)
        evicted += count
    return evicted
