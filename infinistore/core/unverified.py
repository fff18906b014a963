"""Blocks that another process wrote, and that nobody has hashed since.

A store that takes the memory of an earlier process over believes no byte of it: a block
is served once its bytes have the checksum that its writer made. Whoever reads asks for
the keys at hand; the rest is hashed in slices, the most recently used blocks first.
What does not match is dropped.

Leaves to others: to call `verify` before the bytes of a block are read, and
`verify_some` again and again.
"""

from collections.abc import Mapping, Sequence

from infinistore.core.index import Entry, Index, length_of
from infinistore.core.removals import Removals

__all__ = ["Unverified"]


class Unverified:
    """The blocks of `waiting`, in the order in which they are hashed if nobody asks for
    them."""

    def __init__(self, removals: Removals, waiting: Mapping[str, Entry]) -> None:
        self._removals = removals
        self._waiting = dict(waiting)
        self._order = iter(list(waiting))
        self.dropped = 0
        """How many did not match their checksums."""

    def __len__(self) -> int:
        return len(self._waiting)

    def verify(self, index: Index, keys: Sequence[str]) -> bool:
        """Hash the blocks of these keys that nobody has hashed; whether any was
        dropped."""
        if not self._waiting or self._waiting.keys().isdisjoint(keys):
            return False
        before = self.dropped
        for key in keys:
            self._verify(index, key)
        return self.dropped > before

    def verify_some(self, index: Index, most_bytes: int) -> bool:
        """Hash about so many bytes of blocks, at least one block; whether any is
        left."""
        for key in self._order:
            most_bytes -= self._verify(index, key)
            if most_bytes <= 0:
                break
        return bool(self._waiting)

    def _verify(self, index: Index, key: str) -> int:
        """Hash a block, if it still has its key; return how many bytes that were."""
        entry = self._waiting.pop(key, None)
        if entry is None or index.get(key) != entry:  # replaced, deleted or evicted meanwhile
            return 0
        self.dropped += self._removals.drop_if_damaged(index, key)
        return length_of(entry)
