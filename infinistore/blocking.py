"""The store for threads: `with infinistore.blocking.open_store(...) as store`; and what
is done, page by page, with all keys that have a prefix.
"""

from collections.abc import Callable, Iterator
from typing import Final

from infinistore.client.api.blocking_store import BlockingLease, BlockingReservation, BlockingStore
from infinistore.client.api.results import PrefixMatch
from infinistore.client.drivers.blocking_driver import connect, open_store
from infinistore.client.memory.buffers import Registration
from infinistore.client.requests import EndCopies, RemovedKeys
from infinistore.errors import DiskFailed, StoreUnavailable
from infinistore.kept_errors import KeptError
from infinistore.protocol.messages import Found, Prefetched

__all__ = [
    "BlockingLease",
    "BlockingReservation",
    "BlockingStore",
    "Found",
    "Prefetched",
    "PrefixMatch",
    "Registration",
    "RemovedKeys",
    "connect",
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


PASSES_WHILE_BLOCKS_MOVE: Final = 3
"""How often keys are listed to delete them while nodes join or drain. A node may evict
a key before it lists it, while a copy is on its way to a node that has listed its keys.
The copies of before are ended each time, and they go over two nodes at most: from one
that drains to a second copy, and from there to one that joins."""


def delete_by_prefix(store: BlockingStore, prefix: str) -> tuple[int, str]:
    """Delete all keys with this prefix, on every node: `do_by_prefix` says what this
    returns and raises. In a cluster, no copy from node to node brings one back.
    """
    count, lost, moved = 0, "", True
    for _ in range(PASSES_WHILE_BLOCKS_MOVE):
        try:
            moves = store.is_cluster and store._call(EndCopies())
        except StoreUnavailable as error:
            moves, lost = False, str(error)
        if not (moved or moves):  # neither before a listing nor after it
            break
        more, also_lost = do_by_prefix(store, prefix, store.delete)
        count, lost, moved = count + more, also_lost or lost, moves
        if lost:
            break
    return count, lost


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
