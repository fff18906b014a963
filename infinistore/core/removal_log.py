"""The last removals of one store, by their numbers, for those who follow them.

A key is removed when it loses its block and gets no other: by deletion, eviction, or
because its time is over. One that is put over another is not. Nobody is remembered who
asks: each question names the number to go on from. A log is kept from the first
question until some time after the last one, and costs next to nothing before and after.

What it promises: every removal since the log began has a number, one more than that
before; at most `MOST_KEYS` keys, and `MOST_BYTES` bytes of them, are kept, the last
ones; whoever asks for what is kept no more hears how many that are.

Leaves to others: where else than in memory a key may be.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from random import Random
from typing import NamedTuple

__all__ = ["KEPT_S", "MAX_TOLD_KEYS", "MOST_BYTES", "MOST_KEYS", "RemovalLog", "Told"]

MOST_KEYS = 65_536
MOST_BYTES = 8 * 1024 * 1024
MAX_TOLD_KEYS = 10_000
"""How many removals one answer is about, at most."""
KEPT_S = 300.0
"""How long a log is kept after the last question."""


class Told(NamedTuple):
    """An answer: keys that were removed and are not there, in order; the place to go on
    from, which is the id of a log and a number; and how many removals in between are
    not kept any more, None if nobody knows."""

    keys: list[str]
    place: tuple[int, int]
    missed: int | None = 0


class RemovalLog:
    """The log of one store. `clock` returns seconds, `random` makes the ids of logs."""

    def __init__(
        self,
        clock: Callable[[], float],
        random: Random,
        *,
        most_keys: int = MOST_KEYS,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self.is_kept = False
        """Whether `note` is to be called."""
        self.id = 0
        """Which log it is, among all of all servers; 0 while none is kept."""
        self.next = 0
        """The number of the next removal."""
        self.waiting: list[Callable[[], object]] = []
        """Called once, with the next removal. They must not call the store."""
        self._clock = clock
        self._random = random
        self._most_keys = most_keys
        self._most_bytes = most_bytes
        self._until = 0.0
        self._keys: deque[str] = deque()
        self._bytes = 0

    def note(self, keys: Sequence[str]) -> None:
        """Add keys that were removed, unless nobody asks, or not for long."""
        if not keys or not self.is_kept:
            return
        if self._clock() > self._until:
            self.end()
            return
        self.next += len(keys)
        kept = self._keys
        if len(keys) >= self._most_keys:
            kept.clear()
            self._bytes = 0
            keys = keys[-self._most_keys :]
        kept.extend(keys)
        self._bytes += sum(map(len, keys))
        if (excess := len(kept) - self._most_keys) > 0:
            self._bytes -= sum([len(kept.popleft()) for _ in range(excess)])
        while self._bytes > self._most_bytes:
            self._bytes -= len(kept.popleft())
        self.wake()

    def end(self) -> None:
        """Forget everything. Whoever goes on asking finds another log."""
        self.is_kept = False
        self.id = self.next = self._bytes = 0
        self._keys.clear()
        self.wake()

    def wake(self) -> None:
        """Call those who wait."""
        if self.waiting:
            waiting, self.waiting = self.waiting, []
            for call in waiting:
                call()

    def stop_waiting(self, call: Callable[[], object]) -> None:
        """Call this no more; no effect if it was called."""
        if call in self.waiting:
            self.waiting.remove(call)

    def told(self, place: tuple[int, int], most: int, exists: Callable[[list[str]], bytes]) -> Told:
        """Return up to `most` removals since a place, and go on keeping the log.

        `exists` tells which of them are there again. Another log's place tells only
        where this one is. ValueError: there has been no such number.
        """
        if not self.is_kept:
            self.is_kept = True
            self.id = self._random.getrandbits(63) + 1
        self._until = self._clock() + KEPT_S
        log, number = place
        if log != self.id:
            return Told([], (self.id, self.next), None if log else 0)
        if number > self.next:
            raise ValueError(f"{number} removals cannot have been told: there have been {self.next}")
        first = self.next - len(self._keys)
        begin = max(number, first)
        removed = list(islice(self._keys, begin - first, begin - first + most))
        keys = list(dict.fromkeys(removed))
        if keys:
            keys = [key for key, there in zip(keys, exists(keys), strict=True) if not there]
        return Told(keys, (log, begin + len(removed)), begin - number)
