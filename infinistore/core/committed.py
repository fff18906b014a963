"""The index, and the only way to it: commit what has been written, end what is over.

Clients make prepared batches visible without a call (see `prepared`). Every lookup has
to see them. So the only way to the index is `up_to_date`, which commits them first, and
removes the keys whose time to live is over.
Only `touch` and `use` do not: they change recency, and do not tell what exists.

Leaves to others: what a commit does (the store).
"""

from collections.abc import Callable, Sequence

from infinistore.core.clients import Reservation
from infinistore.core.index import Entry, Index
from infinistore.core.prepared import Prepared
from infinistore.core.retention import Retention

__all__ = ["CommittedIndex"]


class CommittedIndex:
    """The index of a store, empty at first.

    `commit` commits a prepared reservation, with its keys and checksums; `expire`
    removes the keys whose time is over.
    """

    def __init__(
        self,
        prepared: Prepared,
        commit: Callable[[Index, Reservation, Sequence[str], Sequence[int]], object],
        retention: Retention,
        expire: Callable[[Index], object],
    ) -> None:
        self.__index = Index()
        self._prepared = prepared
        self._commit = commit
        self._ends = retention.ends
        self._expire = expire

    def up_to_date(self) -> Index:
        """Commit what has been written by now, and end what is over; return the index
        for one operation."""
        if self._prepared.waiting:
            for reservation, keys, checksums in self._prepared.written():
                self._commit(self.__index, reservation, keys, checksums)
        if self._ends:
            self._expire(self.__index)
        return self.__index

    def touch(self, keys: Sequence[str]) -> None:
        """Make keys the most recent ones, the first key the most recent of all.

        Missing keys are ignored.
        """
        try:
            self.__index.touch(keys)
        except KeyError:
            self.use(keys)

    def touch_one(self, key: str) -> None:
        """Make a key the most recent one. KeyError if it is missing."""
        self.__index.touch_one(key)

    def use(self, keys: Sequence[str]) -> list[Entry]:
        """As `touch`; return the entries of those that are there."""
        entries = self.__index.get_many(keys)
        if not all(entries):
            keys = [key for key, entry in zip(keys, entries, strict=True) if entry is not None]
        self.__index.touch(keys)
        return list(filter(None, entries))
