"""Making the pool larger while the server serves.

Taking memory is slow (half a second per GiB), so a thread makes, touches and maps the arena, and the store goes on,
evicting meanwhile. Arenas are never given back.
"""

import logging
import mmap
from collections.abc import Callable

import trio

from infinistore.core.arena import Arena, create_arena
from infinistore.core.store import StoreCore
from infinistore.errors import OutOfMemory

__all__ = ["PoolGrowth"]

_log = logging.getLogger("infinistore.server")


class PoolGrowth:
    """Adds arenas to a store up to `max_capacity_bytes`, one at a time, when the store says that it wants to grow.

    `step_bytes` is how much an arena has at least, as far as the bound allows; arenas are whole pages of `page_bytes`.
    When the machine has nothing for another arena, the pool stays as it is from then on.
    """

    def __init__(
        self,
        core: StoreCore,
        *,
        max_capacity_bytes: int,
        step_bytes: int,
        page_bytes: int = mmap.PAGESIZE,
        make_arena: Callable[[int, int], Arena] = create_arena,
    ) -> None:
        self._core = core
        self._step_bytes = step_bytes
        self._make_arena = make_arena
        self._wake = trio.Event()
        self._round = trio.Event()
        self._least_bytes = 0
        core.growable_bytes = max(0, max_capacity_bytes - core.pool.capacity_bytes) // page_bytes * page_bytes
        core.on_growth_wanted = self._wake.set

    async def grow_for(self, batch_bytes: int, largest_bytes: int) -> bool:
        """Wait until the pool has grown so that a batch which did not fit may; False if it cannot grow that much.

        `largest_bytes` is the longest block, which has to fit into one arena.
        """
        if not 0 < max(batch_bytes, largest_bytes) <= self._core.growable_bytes:
            return False
        self._least_bytes = max(self._least_bytes, batch_bytes)
        before = self._core.pool.capacity_bytes
        self._wake.set()
        await self._round.wait()
        return self._core.pool.capacity_bytes > before

    async def run(self) -> None:
        """Grow whenever it is wanted, for ever."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            self._core.on_growth_wanted = self._wake.set
            if self._core.growable_bytes:
                await self._add_arena()
            finished, self._round = self._round, trio.Event()
            finished.set()

    async def _add_arena(self) -> None:
        pool = self._core.pool
        length = min(self._core.growable_bytes, max(self._step_bytes, self._least_bytes))
        self._least_bytes = 0
        try:
            arena = await trio.to_thread.run_sync(self._make_arena, len(pool.arenas), length)
        except (OutOfMemory, OSError) as error:  # no memory, or no descriptor for it
            self._core.stop_growth()
            _log.warning("the pool cannot grow", extra={"wanted_bytes": length, "error": str(error)})
        else:
            self._core.add_arena(arena)
            _log.info("the pool grew", extra={"arena_bytes": arena.length, "capacity_bytes": pool.capacity_bytes})
