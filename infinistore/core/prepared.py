"""Prepared reservations: their blocks have names before they are written.

The writer makes them visible without a call, by a word in shared memory that `written`
reads. The store calls it before every lookup, so to everybody else the batch was
committed at that moment.

Leaves to others: checking the names, and what a commit does (the store).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from infinistore.core.clients import Reservation

__all__ = ["Prepared", "Written"]

Written: TypeAlias = Callable[[], Sequence[int] | None]
"""Returns the checksums of the blocks: an empty list if their writer made none, None
while they are not written yet."""


class Prepared:
    """The prepared reservations of a store."""

    def __init__(self) -> None:
        self.waiting: dict[Reservation, tuple[Sequence[str], Written]] = {}
        """Their keys, and what returns their checksums. Read it; change it only through
        the methods."""
        self._keys: set[str] = set()

    def __contains__(self, reservation: Reservation) -> bool:
        return reservation in self.waiting

    def add(self, reservation: Reservation, keys: Sequence[str], written: Written) -> None:
        """Add one; none of its keys is in another."""
        self.waiting[reservation] = keys, written
        self._keys.update(keys)

    def remove(self, reservation: Reservation) -> None:
        """Remove one, if it is there."""
        if reservation in self.waiting:
            keys, _ = self.waiting.pop(reservation)
            self._keys.difference_update(keys)

    def names_any(self, keys: Sequence[str]) -> bool:
        """Whether a block of one of these keys may be written at any moment."""
        return bool(self._keys) and not self._keys.isdisjoint(keys)

    def written(self) -> Iterator[tuple[Reservation, Sequence[str], Sequence[int]]]:
        """Iterate over those written by now, with their keys and checksums.

        Each may be removed meanwhile.
        """
        for reservation, (keys, written) in list(self.waiting.items()):
            checksums = written()
            if checksums is not None:
                yield reservation, keys, checksums
