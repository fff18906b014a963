"""The store for threads: `with infinistore.blocking.open_store(...) as store`."""

from infinistore.client.api.blocking_leases import BlockingLease, BlockingReservation
from infinistore.client.api.blocking_store import BlockingStore
from infinistore.client.api.key_pages import key_pages
from infinistore.client.api.prefix_match import PrefixMatch
from infinistore.client.drivers.blocking_driver import open_store
from infinistore.client.memory.registration import Registration
from infinistore.client.removed import RemovedKeys
from infinistore.client.requests import Found, Prefetched

__all__ = [
    "BlockingLease",
    "BlockingReservation",
    "BlockingStore",
    "Found",
    "Prefetched",
    "PrefixMatch",
    "Registration",
    "RemovedKeys",
    "key_pages",
    "open_store",
]
