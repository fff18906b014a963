"""The removal table of a server, in shared memory: clients that map it see which blocks
are gone.

`infinistore/protocol/shared_tables.py` says what is in it.
"""

from collections.abc import Callable

from infinistore.core.arena import Arena, create_arena
from infinistore.core.store import StoreCore
from infinistore.core.tenants import Tenants
from infinistore.protocol.packed_offsets import pack_offsets
from infinistore.protocol.shared_tables import RemovalTable, granule_bytes_for, removal_table_bytes

__all__ = ["PublishedRemovals"]


class PublishedRemovals:
    """The removal table for a pool of `pool_bytes`. Blocking to make: some
    milliseconds.

    OutOfMemory: there is no memory for it.
    """

    def __init__(self, pool_bytes: int, unit_bytes: int = 1, create_arena: Callable[..., Arena] = create_arena) -> None:
        self.granule_bytes = granule_bytes_for(pool_bytes, unit_bytes)
        self.arena = create_arena(0, removal_table_bytes(pool_bytes, unit_bytes), name="removals")
        self.table = RemovalTable(self.arena.memory, self.granule_bytes)
        self.table.note(())  # counts begin at 1: replies say 0 where there is no table

    @property
    def count(self) -> int:
        """How many removals there have been."""
        return self.table.count

    def watch(self, core: StoreCore | Tenants) -> None:
        """Note what is removed from a store, or from those of tenants, from now on."""
        core.expect_hazards()
        core.on_removal = lambda entries: self.table.note(pack_offsets(entries))

    def share(self) -> int:
        """Return the descriptor of the table, for clients to map and read; the table
        closes it.
        """
        return self.arena.share(writable=False)

    def close(self) -> None:
        """Close it. Clients that have it mapped keep what it says."""
        self.arena.close()
