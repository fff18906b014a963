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
from infinistore.errors import StoreUnavailable
from infinistore.kept_errors import KeptError

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

    Nodes of a cluster that do not answer are passed over; with `every_node`, the
    iteration then ends with `StoreUnavailable`, after the pages of the others.

    Raises what `BlockingStore.keys` does.
    """
    last = ""
    lost: KeptError | None = None
    every_node = every_node and store.is_cluster
    while True:
        try:
            page = store.keys(prefix, limit=PAGE_KEYS, after=last, every_node=every_node)
        except StoreUnavailable as error:
            if not every_node:
                raise
            lost, every_node = KeptError(error), False
            continue
        if page:
            yield page
        if len(page) < PAGE_KEYS:
            break
        last = page[-1]
    if lost is not None:
        raise lost.again()
