"""Eviction every few seconds, so that fewer puts have to evict."""

import logging

import trio

from infinistore.core.store import StoreCore
from infinistore.server.maintenance.incremental import evict_incrementally

__all__ = ["evict_periodically"]

_log = logging.getLogger("infinistore.server")


async def evict_periodically(core: StoreCore, interval_s: float, low: float, high: float) -> None:
    """Every `interval_s`, let holds expire and evict down to `low` if more than `high`
    is used. Never returns.
    """
    while True:
        await trio.sleep(interval_s)
        core.expire_holds()
        evicted = await evict_incrementally(core, low, high, "periodic")
        if evicted:
            _log.info("evicted periodically", extra={"blocks": evicted})
