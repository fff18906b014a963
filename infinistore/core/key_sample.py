"""A random sample of the keys of an index, kept up to date as keys are inserted.

A million keys are too many to walk while a server waits. The ends of the recency order
can be read at once, but they are the coldest and warmest keys and not representative.
So one insertion in every few is noted, chosen at random. A note counts as long as its
key still has the same entry. So every existing key was noted with the same probability,
however often it was put.

The cost is one subtraction per batch, and less than 1 us for each insertion noted.
"""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

__all__ = ["KeySample"]

_FIRST_STEP = 32
_FIRST_OFFSET = int(Random(0).random() * _FIRST_STEP)
MAX_NOTED = 4096


class KeySample:
    """Some of the keys of `entries`. Whoever inserts keys there calls `note`."""

    __slots__ = ("_entries", "_noted", "_offset", "_random", "_step", "left")

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self._entries = entries
        self._noted: list[tuple[str, Any]] = []
        self._random: Random | None = None  # made when first needed: it takes 2.5 KiB
        self._step = _FIRST_STEP  # one insertion in so many is noted,
        self._offset = _FIRST_OFFSET  # this one of them
        self.left = self._offset
        """How many insertions are to be passed over. Whoever inserts takes off theirs,
        and calls `note` below zero."""

    def note(self, keys: Sequence[str], entries: Sequence[Any]) -> None:
        """Note what is due of a batch that was inserted, and taken off `left`."""
        count, step, offset = len(keys), self._step, self._offset
        random = self._random
        if random is None:
            random = self._random = Random(1)  # to be fair, not to be unforeseen: the same calls give the same sample
        position = self.left + count
        while position < count:
            self._noted.append((keys[position], entries[position]))
            position += step - offset
            offset = int(random.random() * step)
            position += offset
        self.left, self._offset = position - count, offset
        if len(self._noted) > MAX_NOTED:
            self._noted = self._present()
            if len(self._noted) > MAX_NOTED // 2:
                self._noted = [noted for noted in self._noted if random.getrandbits(1)]
                self._step *= 2

    def keys(self) -> list[str]:
        """Return the sample: at most `MAX_NOTED` keys, in arbitrary order."""
        return [key for key, _ in self._present()]

    def _present(self) -> list[tuple[str, Any]]:
        get = self._entries.get
        return [noted for noted in self._noted if get(noted[0]) is noted[1]]
