"""The journal: what a store committed and removed, for the disk tier below it.

It has one item for each batch, in the order in which the store carried it out, whether
a call asked for it or a word in shared memory (`StoreCore.prepare`). From these items,
a reader knows which block each key has. Only evictions are missing: an evicted block is
still the last one that was put under its key.

Leaves to others: to call `take`, soon and again; items refer to keys and entries, and
nothing else forgets them.
"""

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from infinistore.core.index import Entry

Change: TypeAlias = Literal["put", "delete", "purge", "drop", "read"]
"""What happened to the keys of an item.

- put: they have new blocks, the entries; without those that a put with `replace=False`
  left alone.
- delete: a call named them, whether they were there or not, or their time was over.
  Before a put of blocks that have a time to live, too: no second copy may outlive them.
- purge: all keys were removed, and these were there.
- drop: the block did not match its checksum, and was removed.
- read: a lease found them, or a client read them without a request.
"""

JournalItem: TypeAlias = tuple[Change, Sequence[str], Sequence[Entry]]
"""(change, keys, entries). Only a put has entries. Neither sequence is ever changed."""


class Journal:
    """The items of one store that nobody has taken yet. With `reads`, reads are told,
    too."""

    __slots__ = ("_items", "on_first", "reads")

    def __init__(self, *, reads: bool = False) -> None:
        self.reads = reads
        self.on_first: Callable[[], object] | None = None
        """Called when there is an item and there was none. It must not call the
        store."""
        self._items: list[JournalItem] = []

    def __len__(self) -> int:
        return len(self._items)

    def append(self, change: Change, keys: Sequence[str], entries: Sequence[Entry] = ()) -> None:
        """Add an item. For the store."""
        self._items.append((change, keys, entries))
        if len(self._items) == 1 and self.on_first is not None:
            self.on_first()

    def take(self) -> list[JournalItem]:
        """Return the items, oldest first, and forget them."""
        items, self._items = self._items, []
        return items
