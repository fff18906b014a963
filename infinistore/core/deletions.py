"""When keys were deleted last, so that no copy brings one back that is under way.

Whoever copies a block from another store to this one asks for a *mark* here, then reads
the block there, and puts it here with the mark. The put skips a key that was deleted
here after the mark. Whoever deletes a key tells this store last, when all those that a
copy may come from have carried it out. Then no copy brings the key back, whatever the
order of the other steps:

- The mark is older than the deletion here. Then the put comes before the deletion,
  which removes what it stored, or after it, and skips the key.
- The mark is younger. Then the block was read after the deletion here, so after the
  deletion there: it was not there any more.

The deletions are numbered, and a mark is a number. Instead of keys, a table of fixed
length has the last number of all keys with one hash. So nothing is ever forgotten, and
no memory grows: a key that shares its hash with one that was deleted is not copied, at
worst. The table is made for the first mark. Before that, a deletion costs nothing more.

Marks begin at a random number, so that one of another store, or of an earlier run, is
none of this one.
"""

from array import array
from collections.abc import Sequence
from random import Random

from xxhash import xxh3_64_intdigest

SLOTS = 8192
"""How many hashes there are: with 1,000 deletions while a copy is under way, an eighth
of all copies is skipped."""
_FIRST_BITS = 62


class Deletions:
    """The deletions of one store."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._last: array[int] | None = None
        self._number = 0
        self._all = 0
        """The number of the last deletion of all keys."""

    def mark(self, *, ends_earlier: bool = False) -> int:
        """Return a mark, which is not 0. `ends_earlier`: puts with an earlier one store
        nothing from now on.
        """
        if self._last is None:
            self._last = array("Q", bytes(8 * SLOTS))
            self._number = self._all = 1 + self._random.getrandbits(_FIRST_BITS)
        elif ends_earlier:
            self.note_all()
        return self._number

    def note(self, keys: Sequence[str]) -> None:
        """Note that these keys are being deleted, whether they are there or not."""
        last = self._last
        if last is None:
            return
        self._number += 1
        for key in keys:
            last[_slot(key)] = self._number

    def note_all(self) -> None:
        """Note that all keys are being deleted."""
        if self._last is not None:
            self._number += 1
            self._all = self._number

    def since(self, mark: int, keys: Sequence[str]) -> bytes:
        """Return one byte per key: 1 if it may have been deleted after this mark."""
        last = self._last
        if last is None or not self._all <= mark <= self._number:
            return b"\1" * len(keys)
        return bytes([last[_slot(key)] > mark for key in keys])


def _slot(key: str) -> int:
    return xxh3_64_intdigest(key.encode()) % SLOTS
