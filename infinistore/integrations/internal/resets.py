"""Deletes all blocks of an engine from a store, as for new weights."""

from contextlib import suppress

from infinistore.blocking import BlockingStore, key_pages
from infinistore.errors import StoreUnavailable

__all__ = ["count_on_disks", "delete_all"]


def delete_all(store: BlockingStore, prefix: str) -> int:
    """Delete the keys with this prefix. Return how many were deleted.

    Raises what `BlockingStore.keys` and `delete` do, among it:

        StoreUnavailable: a node of a cluster, which the message names, could not be
            reached, and may have some still. The others have none.
    """
    try:
        return sum(store.delete(page) for page in key_pages(store, prefix, every_node=True))
    except StoreUnavailable:
        for page in key_pages(store, prefix):
            with suppress(StoreUnavailable):
                store.delete(page)
        raise


def count_on_disks(store: BlockingStore) -> int:
    """Return how many keys the store's disks have, whose blocks may be in no memory:
    `delete_all` is not told of those.
    """
    disk = store.stats().disk
    return 0 if disk is None else sum(one.keys for one in disk.disks)
