"""Something is done with all keys that have a prefix, on every node of a cluster."""

from collections.abc import Callable

from infinistore.blocking import BlockingStore, key_pages
from infinistore.errors import DiskFailed, StoreUnavailable
from infinistore.kept_errors import KeptError

__all__ = ["do_by_prefix"]


def do_by_prefix(store: BlockingStore, prefix: str, call: Callable[[list[str]], int]) -> tuple[int, str]:
    """Call with each page of the keys that have this prefix. Return the sum of what
    that returned and, if a node of a cluster does not answer and may have such keys
    still, its error in words, else nothing. The others have done their part.

    Raises what `BlockingStore.keys` and `call` do: `StoreUnavailable` only if the store
    is no cluster, `DiskFailed` when all pages are over.
    """
    count, lost = 0, ""
    failed: KeptError | None = None
    try:
        for page in key_pages(store, prefix, every_node=store.is_cluster):
            try:
                count += call(page)
            except DiskFailed as error:
                failed = KeptError(error)
            except StoreUnavailable as error:
                if not store.is_cluster:
                    raise
                lost = str(error)
    except StoreUnavailable as error:
        if not store.is_cluster:
            raise
        lost = str(error)
    if failed is not None:
        raise failed.again()
    return count, lost
