"""Work on many blocks in slices of a few milliseconds, so that other tasks run in
between.

Deleting a million keys takes about a second.
"""

import trio

from infinistore.core.index import first_keys
from infinistore.core.space import EvictionCause
from infinistore.core.store import StoreCore

__all__ = ["evict_incrementally", "list_keys_incrementally", "purge_incrementally"]

_SLICE_KEYS = 4096


async def purge_incrementally(core: StoreCore) -> int:
    """Delete the keys that there are now, and return how many. New keys stay."""
    purged = 0
    for count in core.purge_in_slices():
        purged += count
        await trio.lowlevel.checkpoint()
    return purged


async def list_keys_incrementally(core: StoreCore, prefix: str, limit: int, after: str) -> list[str]:
    """Return one page of the current keys, in code point order."""
    keys = core.all_keys()
    page: list[str] = []
    for first in range(0, len(keys), _SLICE_KEYS):
        page = first_keys([*page, *keys[first : first + _SLICE_KEYS]], prefix, limit, after)
        await trio.lowlevel.checkpoint()
    return page


async def evict_incrementally(core: StoreCore, low: float, high: float, cause: EvictionCause) -> int:
    """If more than `high` of the pool is used, evict until at most `low` is; return how
    many blocks.

    Raises:
        ValueError: not 0 <= low <= high <= 1.
    """
    count = core.evict(low, high, cause, max_blocks=_SLICE_KEYS)
    evicted = count
    while count:
        await trio.lowlevel.checkpoint()
        count = core.evict(low, low, cause, max_blocks=_SLICE_KEYS)
        evicted += count
    return evicted
