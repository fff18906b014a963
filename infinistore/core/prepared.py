"""Reservations whose blocks have names before they are written.

Who writes them makes them visible alone, without a call: it says so in a place that `written` looks at. The store asks
before it looks anything up, so nobody can tell the difference from a commit at that moment.

Leaves to others: checking the names, and what a commit does (the store).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from infinistore.core.clients import Reservation

__all__ = ["Prepared", "Written"]

Written: TypeAlias = Callable[[], Sequence[int] | None]
"""Tells the checksums of the blocks, an empty list if their writer made none, or None while they are not there yet."""


class Prepared:
    """The prepared reservations of a store."""

    def __init__(self) -> None:
        self._waiting: dict[Reservation, tuple[Sequence[str], Written]] = {}
        self._keys: set[str] = set()

    def __contains__(self, reservation: Reservation) -> bool:
        return reservation in self._waiting

    def add(self, reservation: Reservation, keys: Sequence[str], written: Written) -> None:
        """Add one; none of its keys is in another."""
        self._waiting[reservation] = keys, written
        self._keys.update(keys)

    def remove(self, reservation: Reservation) -> None:
        """Remove one, if it is there."""
        if reservation in self._waiting:
            keys, _ = self._waiting.pop(reservation)
            self._keys.difference_update(keys)

    def names_any(self, keys: Sequence[str]) -> bool:
        """Whether a block of one of these keys may be written at any moment."""
        return bool(self._keys) and not self._keys.isdisjoint(keys)

    def take_written(self) -> Iterator[tuple[Reservation, Sequence[str], Sequence[int]]]:
        """Take out those that have been written by now, with their keys and checksums."""
        if not self._waiting:  # nearly always
            return
        for reservation, (keys, written) in list(self._waiting.items()):
            checksums = written()
            if checksums is not None:
                self.remove(reservation)
                yield reservation, keys, checksums
