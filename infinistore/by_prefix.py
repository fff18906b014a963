"""Something is done with all keys that have a prefix, on every node of a cluster."""

from collections.abc import Callable

from infinistore.blocking import BlockingStore, key_pages
from infinistore.errors import StoreUnavailable

__all__ = ["do_by_prefix"]


def do_by_prefix(store: BlockingStore, prefix: str, call: Callable[[list[str]], int]) -> tuple[int, str]:
    """Call with each page of the keys that have this prefix. Return the sum of what
    that returned and, if a node of a cluster does not answer and may have such keys
    still, its error in words, else nothing. The others have done their part.

    Raises what `BlockingStore.keys` and `call` do: `StoreUnavailable` only if the store
    is no cluster.
    """
    if not store.is_cluster:
        return sum(map(call, key_pages(store, prefix))), ""
    count, lost = 0, ""
    try:
        for page in key_pages(store, prefix, every_node=True):
            try:
                count += call(page)
            except StoreUnavailable as error:
                lost = str(error)
    except StoreUnavailable as error:
        lost = str(error)
    return count, lost
