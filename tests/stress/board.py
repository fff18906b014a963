"""What the processes of a stress run know of each other, in memory that they share:
which version each key may have.

A key has one writer. It notes each version before it writes it and after, so that a
reader knows, whatever happens at the same moment, between which two the version must be
that it reads. A deletion is a version without a value.

When the outcome of a write is not known, it may be carried out at any later time: the
writer leaves all of its keys and takes others. Their names have the number of the epoch
in them, which is odd while the notes are being changed.

With a disk, values outlive the server. If it was killed, an older value may be back,
but none that is older than what was durable, or than a deletion. So a version counts as
committed in the life of the server in which its put began, and there are versions that
count in all lives.
"""

import mmap
from typing import Any

__all__ = ["KEYS", "Board"]

KEYS = 12
"""Of each writer."""
_COUNTS = 4  # stop, then calls, values that were checked, and those that were missing
_COLUMNS = 4  # committed, begun, in which life it was committed, what no crash takes back
_NUMBERS = 1 + _COLUMNS * KEYS + _COUNTS
_FIXED = 2  # whether it is over, and the number of the server's life


class Board:
    """To be made before the processes are forked."""

    def __init__(self, writers: int) -> None:
        self.writers = writers
        self._numbers: Any = memoryview(mmap.mmap(-1, 8 * (_FIXED + writers * _NUMBERS))).cast("Q")

    @property
    def over(self) -> bool:
        """Whether all should end."""
        return bool(self._numbers[0])

    def end(self) -> None:
        """Have all end."""
        self._numbers[0] = 1

    @property
    def life(self) -> int:
        """Even for each server, and odd while one is being killed."""
        return int(self._numbers[1])

    def next_life(self) -> None:
        """Note that the server is about to be killed, or that it is gone."""
        self._numbers[1] += 1

    def epoch(self, writer: int) -> int:
        return int(self._numbers[self._at(writer)])

    def committed(self, writer: int, key: int) -> int:
        """The oldest version that the key may have now."""
        place = self._at(writer) + 1 + key
        # In this order: it is written in the other one.
        committed, life = int(self._numbers[place]), int(self._numbers[place + 2 * KEYS])
        return committed if life == self.life else self.kept(writer, key)

    def kept(self, writer: int, key: int) -> int:
        """The oldest version that the key may have whatever happens to the server."""
        return int(self._numbers[self._at(writer) + 1 + 3 * KEYS + key])

    def begun(self, writer: int, key: int) -> int:
        return int(self._numbers[self._at(writer) + 1 + KEYS + key])

    def begin(self, writer: int, key: int) -> int:
        """Begin the next version of a key; return its number."""
        place = self._at(writer) + 1 + KEYS + key
        self._numbers[place] += 1
        return int(self._numbers[place])

    def commit(self, writer: int, key: int, version: int, life: int) -> None:
        """Note a write that has ended, and that began in this life of the server."""
        place = self._at(writer) + 1 + key
        self._numbers[place] = version
        self._numbers[place + 2 * KEYS] = life

    def keep(self, writer: int, key: int, version: int) -> None:
        """Note that no crash takes this version back: it is durable, or a deletion."""
        self._numbers[self._at(writer) + 1 + 3 * KEYS + key] = version

    def leave_keys(self, writer: int) -> None:
        """Take other keys."""
        start = self._at(writer)
        self._numbers[start] |= 1
        for place in range(start + 1, start + 1 + _COLUMNS * KEYS):
            self._numbers[place] = 0
        self._numbers[start] += 1

    def count(self, writer: int, *, calls: int = 0, checked: int = 0, missing: int = 0) -> None:
        """Count what a process has done."""
        start = self._at(writer) + 1 + _COLUMNS * KEYS
        for place, more in enumerate((calls, checked, missing), start):
            self._numbers[place] += more

    def counts(self) -> dict[str, int]:
        starts = [self._at(writer) + 1 + _COLUMNS * KEYS for writer in range(self.writers)]
        return {
            name: sum(self._numbers[start + place] for start in starts)
            for place, name in enumerate(("calls", "checked", "missing"))
        }

    @staticmethod
    def _at(writer: int) -> int:
        return _FIXED + writer * _NUMBERS
