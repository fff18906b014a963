"""What a server does beside its requests: work on many blocks in slices of a few
milliseconds, eviction every few seconds, and growth of the pool.

Deleting a million keys takes about a second, so other tasks run in between. Taking
memory takes about half a second per GiB, so a thread creates and maps the arena, and
meanwhile the store goes on, and evicts if it must. Arenas are never given back.
"""

import logging
import mmap
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from infinistore.answers import evict_in_steps
from infinistore.core.arena import Arena, create_arena
from infinistore.core.pool import Pool
from infinistore.core.store import StoreCore
from infinistore.errors import ConfigError, OutOfMemory
from infinistore.eviction.reuse import WantedPool
from infinistore.host import NO_THREAD
from infinistore.server.disk import settle

_log = logging.getLogger("infinistore.server")
_MUCH = 0.1
"""The part of all puts that is worth a larger pool."""
_SILENT_S = 3600.0


async def evict_periodically(core: StoreCore, interval_s: float, low: float, high: float) -> None:
    """Every `interval_s`, expire holds, and evict from `high` to `low`, for ever."""
    while True:
        await trio.sleep(interval_s)
        core.expire_holds()
        evicted = await settle(evict_in_steps(core, low, high, "periodic"))
        if evicted:
            _log.info("evicted periodically", extra={"blocks": evicted})


class SizeAdvice:
    """Says in the log what a larger pool would have been worth, at most once an hour:
    the figures of a small pool change all the time.
    """

    def __init__(self, pool: Pool, clock: Callable[[], float] = trio.current_time) -> None:
        self._pool = pool
        self._clock = clock
        self._again_at = 0.0

    def tell(self, wanted: WantedPool) -> None:
        """Take what the store found out."""
        now = self._clock()
        if wanted.avoidable < _MUCH or now < self._again_at:
            return
        self._again_at = now + _SILENT_S
        capacity_bytes = self._pool.capacity_bytes
        _log.warning(
            "a larger pool would have had blocks that were evicted and put again",
            extra={
                "capacity_bytes": capacity_bytes,
                "wanted_bytes": round(wanted.pools * capacity_bytes),
                "percent_of_puts": round(100 * wanted.avoidable),
            },
        )


class PoolGrowth:
    """Adds arenas to a store up to `max_capacity_bytes`, one at a time, when the store
    asks for growth.

    An arena has at least `step_bytes`, as far as the bound allows, and consists of
    whole pages of `page_bytes`. If the machine has no memory for another arena, the
    pool does not grow any more.
    """

    def __init__(
        self,
        core: StoreCore,
        *,
        max_capacity_bytes: int,
        step_bytes: int,
        page_bytes: int = mmap.PAGESIZE,
        make_arena: Callable[[int, int], Arena] = create_arena,
        run_in_thread: Callable[..., Awaitable[Any]] = trio.to_thread.run_sync,
    ) -> None:
        self._core = core
        self._step_bytes = step_bytes
        self._make_arena = make_arena
        self._run_in_thread = run_in_thread
        self._wake = trio.Event()
        self._round = trio.Event()
        self._least_bytes = 0
        core.growth.growable_bytes = max(0, max_capacity_bytes - core.pool.capacity_bytes) // page_bytes * page_bytes
        core.growth.on_wanted = self._wake.set

    async def grow_for(self, batch_bytes: int, largest_bytes: int) -> bool:
        """Wait until the pool has grown for a batch that did not fit; return False if
        it cannot grow that much.

        `largest_bytes` is the length of the longest block, which has to fit in one
        arena.
        """
        if not 0 < max(batch_bytes, largest_bytes) <= self._core.growth.growable_bytes:
            return False
        self._least_bytes = max(self._least_bytes, batch_bytes)
        before = self._core.pool.capacity_bytes
        self._wake.set()
        await self._round.wait()
        return self._core.pool.capacity_bytes > before

    async def run(self) -> None:
        """Grow whenever the store asks for it. Never returns."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            self._core.growth.on_wanted = self._wake.set
            if self._core.growth.growable_bytes:
                await self._add_arena()
            finished, self._round = self._round, trio.Event()
            finished.set()

    async def _add_arena(self) -> None:
        pool = self._core.pool
        length = min(self._core.growth.growable_bytes, max(self._step_bytes, self._least_bytes))
        self._least_bytes = 0
        try:
            arena = await self._run_in_thread(self._make_arena, len(pool.arenas), length)
        except (OutOfMemory, ConfigError, OSError, *NO_THREAD) as error:  # no memory there, no descriptor, no thread
            self._core.growth.stop()
            _log.warning("the pool cannot grow", extra={"wanted_bytes": length, "error": str(error)})
        else:
            self._core.add_arena(arena)
            _log.info("the pool grew", extra={"arena_bytes": arena.length, "capacity_bytes": pool.capacity_bytes})
