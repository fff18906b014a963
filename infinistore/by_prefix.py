"""Something is done with all keys that have a prefix, on every node of a cluster."""

from collections.abc import Callable

from infinistore.blocking import BlockingStore, key_pages
from infinistore.errors import StoreUnavailable

__all__ = ["do_by_prefix"]


def do_by_prefix(
    store: BlockingStore, prefix: str, call: Callable[[list[str]], int]
) -> tuple[int, StoreUnavailable | None]:
    """Call with each page of the keys that have this prefix. Return the sum of what
    that returned, and the error of a node of a cluster that may have such keys still.
    The others have done their part.

    Raises what `BlockingStore.keys` and `call` do: `StoreUnavailable` only if the store
    is no cluster.
    """
    count, lost = 0, None
    try:
        for page in key_pages(store, prefix, every_node=True):
            try:
                count += call(page)
            except StoreUnavailable as error:
                lost = error
    except StoreUnavailable as error:
        lost = error
    if lost is not None and not store.is_cluster:
        raise lost
    return count, lost
