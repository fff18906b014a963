"""The store itself: memory, index, pins and eviction. No sockets, no tasks, no clock of
its own.

`store.py` is the store, the other modules are its parts. `tenants.py` and
`sharing.py` are stores that share a pool. `hand_over.py` and `pool_state.py` pass a
store on to another process.
"""

from infinistore.core.arena import Arena, create_arena
from infinistore.core.clients import Client, Lease, Reservation
from infinistore.core.index import NO_CHECKSUM, Entry
from infinistore.core.journal import Journal
from infinistore.core.limits import CoreLimits, Watermarks
from infinistore.core.pool import Pool
from infinistore.core.space import EvictionCause, Growth
from infinistore.core.store import StoreCore
from infinistore.statistics import EvictionStatistics, StoreStatistics

__all__ = [
    "NO_CHECKSUM",
    "Arena",
    "Client",
    "CoreLimits",
    "Entry",
    "EvictionCause",
    "EvictionStatistics",
    "Growth",
    "Journal",
    "Lease",
    "Pool",
    "Reservation",
    "StoreCore",
    "StoreStatistics",
    "Watermarks",
    "create_arena",
]
