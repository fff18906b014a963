"""Goes through all keys with a prefix, in pages as large as a server gives.

A server looks at all of its keys for each page, which takes it some tenths of a second
with a million. So few large pages take a tenth of the time of many small ones.
"""

from collections.abc import Iterator
from typing import Final

from infinistore.blocking import BlockingStore

__all__ = ["PAGE_KEYS", "delete_all", "pages"]

PAGE_KEYS: Final = 10_000
"""As many as a server puts into one answer."""


def pages(store: BlockingStore, prefix: str) -> Iterator[list[str]]:
    """Return the keys with this prefix, page by page. They may be deleted meanwhile.

    Raises what `BlockingStore.keys` does.
    """
    last = ""
    while page := store.keys(prefix, limit=PAGE_KEYS, after=last):
        yield page
        if len(page) < PAGE_KEYS:
            return
        last = page[-1]


def delete_all(store: BlockingStore, prefix: str) -> int:
    """Delete the keys with this prefix. Return how many were deleted.

    Raises what `BlockingStore.keys` and `delete` do.
    """
    return sum(store.delete(page) for page in pages(store, prefix))
