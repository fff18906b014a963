"""The index, and the only way to it: commit what has been written, end what is over.

The blocks of a prepared reservation have names before they are written. The writer
makes them visible without a call, by a word in shared memory that `written` reads.
Every lookup has to see them. So the only way to the index is `up_to_date`, which
commits them first, and removes the keys whose time to live is over: to everybody else
the batch was committed at that moment. Only `touch` and `use` do not: they change
recency, and do not tell what exists.

Leaves to others: checking the names, and what a commit does (the store).
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from infinistore.core.clients import Reservation
from infinistore.core.index import Entry, Index
from infinistore.core.retention import Retention

Written: TypeAlias = Callable[[], Sequence[int] | None]
"""Returns the checksums of the blocks: an empty list if their writer made none, None
while they are not written yet."""


class CommittedIndex:
    """The index of a store, empty at first, and its prepared reservations.

    `commit` commits a prepared reservation, with its keys and checksums; `expire`
    removes the keys whose time is over.
    """

    def __init__(
        self,
        commit: Callable[[Index, Reservation, Sequence[str], Sequence[int]], object],
        retention: Retention,
        expire: Callable[[Index], object],
    ) -> None:
        self.__index = Index()
        self._prepared: dict[Reservation, tuple[Sequence[str], Written]] = {}
        self._prepared_keys: set[str] = set()
        self._commit = commit
        self._ends = retention.ends
        self._expire = expire

    def up_to_date(self) -> Index:
        """Commit what has been written by now, and end what is over; return the index
        for one operation."""
        if self._prepared:
            for reservation, (keys, written) in list(self._prepared.items()):  # each is forgotten meanwhile
                checksums = written()
                if checksums is not None:
                    self._commit(self.__index, reservation, keys, checksums)
        if self._ends:
            self._expire(self.__index)
        return self.__index

    def prepare(self, reservation: Reservation, keys: Sequence[str], written: Written) -> None:
        """Commit a reservation once it is written; none of its keys is in another that
        is prepared."""
        self._prepared[reservation] = keys, written
        self._prepared_keys.update(keys)

    def is_prepared(self, reservation: Reservation) -> bool:
        """Whether a reservation is prepared."""
        return reservation in self._prepared

    def forget(self, reservation: Reservation) -> None:
        """Forget a reservation that was committed or given up, if it was prepared."""
        if reservation in self._prepared:
            keys, _ = self._prepared.pop(reservation)
            self._prepared_keys.difference_update(keys)

    def names_any(self, keys: Sequence[str]) -> bool:
        """Whether a block of one of these keys may be written at any moment."""
        return bool(self._prepared_keys) and not self._prepared_keys.isdisjoint(keys)

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
