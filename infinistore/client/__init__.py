"""Clients: one protocol, driven by Trio, by threads or by asyncio.

`open_store` and `connect` here are those for Trio; `infinistore.blocking` has those for
threads.
"""

from infinistore.client.api.results import PrefixMatch
from infinistore.client.api.store import AsyncLease, AsyncReservation, AsyncStore
from infinistore.client.drivers.trio_driver import connect, open_store
from infinistore.client.memory.buffers import Registration
from infinistore.client.requests import RemovedKeys
from infinistore.client.store_options import StoreOptions
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
    "StoreOptions",
    "connect",
    "open_store",
]
