"""All keys with a prefix, in pages as large as a server gives.

A server looks at all of its keys for each page, which takes it some tenths of a second
with a million. So few large pages take a tenth of the time of many small ones.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from infinistore.client.api.blocking_store import BlockingStore

__all__ = ["PAGE_KEYS", "key_pages"]

PAGE_KEYS: Final = 10_000
"""As many as a server puts into one answer."""


def key_pages(store: "BlockingStore", prefix: str, *, every_node: bool = False) -> Iterator[list[str]]:
    """Return the keys with this prefix, page by page. They may be deleted meanwhile.

    Raises what `BlockingStore.keys` does, which also says what `every_node` is.
    """
    last = ""
    while page := store.keys(prefix, limit=PAGE_KEYS, after=last, every_node=every_node):
        yield page
        if len(page) < PAGE_KEYS:
            return
        last = page[-1]
