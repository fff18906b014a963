"""The store for asyncio and uvloop: `async with infinistore.aio.open_store(...) as
store`.
"""

from infinistore.client.api.results import PrefixMatch
from infinistore.client.api.store import AsyncLease, AsyncReservation, AsyncStore
from infinistore.client.drivers.asyncio_driver import connect, open_store
from infinistore.client.memory.buffers import Registration
from infinistore.client.requests import RemovedKeys
from infinistore.protocol.messages import Found, Prefetched

__all__ = [
    "AsyncLease",
    "AsyncReservation",
    "AsyncStore",
    "Found",
    "Prefetched",
    "PrefixMatch",
    "Registration",
    "RemovedKeys",
    "connect",
    "open_store",
]
