"""The store for threads: `with infinistore.blocking.open_store(...) as store`."""

from collections.abc import Iterator
from typing import Final

from infinistore.client.api.blocking_leases import BlockingLease, BlockingReservation
from infinistore.client.api.blocking_store import BlockingStore
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

PAGE_KEYS: Final = 10_000
"""As many as a server puts into one answer. A server looks at all of its keys for each
page, so few large ones take a tenth of the time of many small ones."""


def key_pages(store: BlockingStore, prefix: str, *, every_node: bool = False) -> Iterator[list[str]]:
    """Return the keys with this prefix, page by page. They may be deleted meanwhile.

    Raises what `BlockingStore.keys` does, which also says what `every_node` is.
    """
    last = ""
    while page := store.keys(prefix, limit=PAGE_KEYS, after=last, every_node=every_node):
        yield page
        if len(page) < PAGE_KEYS:
            return
        last = page[-1]
