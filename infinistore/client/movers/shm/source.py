"""Shared memory of a store: where the server's Unix socket is, and the pool that is
mapped.
"""

import threading
from collections.abc import Callable
from typing import Any

from infinistore.client.movers.base import MoverSource
from infinistore.client.movers.channel import Channel
from infinistore.client.movers.shm.mapped_pool import Machine, MappedPool
from infinistore.client.movers.shm.mover import ShmMover
from infinistore.errors import StoreUnavailable
from infinistore.protocol.versions import Capability

__all__ = ["ShmSource"]


class ShmSource(MoverSource):
    """Makes movers for connections to a server on this host.

    `on_end` is called, in a thread, when the server has ended and its pool is closed.
    """

    name = "shm"
    takes_unix_socket = True
    needs = Capability.SHARED_MEMORY

    def __init__(
        self,
        inline_bytes: int,
        copy_threads: int,
        known_blocks: int,
        on_end: Callable[[], None] = lambda: None,
        machine: Machine | None = None,
    ) -> None:
        self._inline_bytes = inline_bytes
        self._copy_threads = copy_threads
        self._known_blocks = known_blocks
        self._on_end = on_end
        self._machine = machine
        self.pool: MappedPool | None = None
        self._lock = threading.Lock()
        self._closed = False

    async def open(self, channel: Channel, stream: Any) -> ShmMover:
        """Make the mover of a connection by Unix socket."""
        return ShmMover(channel, self._pool_of(channel.hello.instance), self._inline_bytes)

    @property
    def instance(self) -> str:
        """The run of a server whose pool is mapped; empty if none is."""
        return "" if self.pool is None else self.pool.instance

    def _pool_of(self, instance: str) -> MappedPool:
        """Return the mapped pool of this run of a server; that of another one is given
        up.
        """
        with self._lock:
            if self._closed:
                raise StoreUnavailable("this store is closed; open another one")
            if self.pool is None or self.pool.closed or self.pool.instance != instance:
                if self.pool is not None:
                    self.pool.close()
                self.pool = MappedPool(
                    instance, self._copy_threads, self._known_blocks, on_end=self._on_end, machine=self._machine
                )
            return self.pool

    def mapped_arenas(self) -> list[tuple[memoryview, memoryview | None]]:
        """Return the server's pool as far as it is mapped here; see
        `MappedPool.arenas`.
        """
        with self._lock:
            return [] if self.pool is None or self._closed else self.pool.arenas()

    def close(self) -> None:
        """Close the pool; views that are still held stay good."""
        with self._lock:
            self._closed = True
            if self.pool is not None:
                self.pool.close()

    def let_go(self) -> None:
        """In a forked child: leave the mappings alone, and close the descriptors."""
        self._lock = threading.Lock()  # another thread of the parent may have held it
        self._closed = True
        if self.pool is not None:
            self.pool.let_go()
