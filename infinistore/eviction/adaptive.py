"""Least recently used first, unless that thrashes; then what is there stays.

Prompts that come in turns, and are a little more than the pool holds, get nothing from
a pool that evicts the least recently used blocks: each block leaves just before it is
asked for again. The same holds for blocks that are asked for once, if there are so many
that they push out those that are asked for often. A pool that keeps the blocks it has,
and lets new ones pass through, does well in both cases, and badly in most others.

So the strategy chooses between the two once in each turn (`Reuse`), by what each would
have hit. It compares the hits with the uses of keys that were there when the turn
began; and while new keys pass through, with the uses that recency alone would have
served. Choosing between insertion at the warm and at the cold end by what a sample
shows is the idea of DIP (Qureshi et al., ISCA 2007).

Keys that pass through are in a *window* of an eighth of the pool: first in, first out.
So a block that is put is there for as long as it takes to write it to a disk, or to
hand it to another engine. A use soon after the put says nothing about later ones (2Q,
Johnson and Shasha, VLDB 1994, and S3-FIFO, Yang et al., SOSP 2023, do likewise); a
later one lets the key stay.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from math import inf, sqrt
from typing import Any, ClassVar

from infinistore.eviction.base import Eviction
from infinistore.eviction.reuse import MOST_POOLS, Reuse

_WINDOW = 1 / 8
"""The part of the keys in the pool that the window has."""
_CLEARLY = 1.25
_LEAST = 1 / 4
_ERRORS = 3
"""New keys pass through if that would have had so many times the hits, as many as this
part of the pool has keys, and so many standard deviations of a count more; in two
trials, one after the other, because a set of prompts may come back once."""


class Adaptive(Eviction):
    """Least recently used first; new keys pass through where that thrashes."""

    name: ClassVar[str] = "adaptive"

    def __init__(self, order: OrderedDict[str, Any], reuse: Reuse) -> None:
        super().__init__(order, reuse)
        self.passes = False
        """Whether new keys pass through a window."""
        self._window: dict[str, float] = {}  # key: position at its put
        self._puts: deque[list[str]] = deque()  # the keys of each put, warmest first
        self._in_puts = 0  # keys in all of them, with those that have left the window
        self._seen = False  # in the last trial, that it would be better if they did
        reuse.on_turn = self._choose

    def insert(self, keys: Sequence[str], entries: Sequence[Any]) -> None:
        """Add keys at the warm end. If new keys pass through, those that leave the
        window for that go to the cold one."""
        if self.passes and not self.reuse.pool_keys:  # the pool was emptied
            self._change()
        if not self.passes:
            super().insert(keys, entries)
            return
        new = [key for key in keys if key not in self.order]
        super().insert(keys, entries)
        if new:
            self._window.update(dict.fromkeys(new, self.reuse.position))
            self._puts.append(new)
            self._in_puts += len(new)
        if self._in_puts > 2 * len(self._window) + len(new):
            self._forget_left()
        while self._puts and len(self._window) - len(self._puts[0]) >= _WINDOW * self.reuse.pool_keys:
            self._in_puts -= len(self._puts[0])
            self._let_pass(self._puts.popleft())

    def touch(self, keys: Sequence[str]) -> None:
        """Make keys the warmest. One that has been in the window for a while leaves
        it, and stays."""
        super().touch(keys)
        window = self._window
        if window and not window.keys().isdisjoint(keys):
            before = self.reuse.position - _WINDOW / 2 * self.reuse.pool_keys
            for key in keys:
                if window.get(key, inf) <= before:
                    del window[key]

    def touch_one(self, key: str) -> None:
        """As `touch` with one key."""
        if self._window:
            self.touch((key,))
        else:
            self.order.move_to_end(key)

    def _forget_left(self) -> None:
        """Forget the keys of puts that have left the window, or were put again."""
        left = dict.fromkeys(self._window)
        puts, self._puts = self._puts, deque()
        for put in reversed(puts):
            kept = [key for key in put if key in left]
            for key in kept:
                del left[key]
            if kept:
                self._puts.appendleft(kept)
        self._in_puts = len(self._window)

    def _let_pass(self, keys: list[str]) -> None:
        """Move those keys of a put to the cold end that are in the window still."""
        for key in keys:
            if self._window.pop(key, None) is not None and key in self.order:
                self.order.move_to_end(key, last=False)

    def _choose(self) -> bool:
        reuse = self.reuse
        if self.passes:
            if reuse.recent - reuse.hits > sqrt(reuse.recent + reuse.hits):
                self._change()
                return True
            return False
        hits, standing = reuse.hits, reuse.standing
        clearly = standing * reuse.step >= _LEAST * reuse.pool_keys and standing > _CLEARLY * hits
        if clearly and standing - hits > _ERRORS * sqrt(standing + hits):
            if self._seen:
                self._change()
            else:
                self._seen = True
            return True
        if reuse.turns == MOST_POOLS:
            self._seen = False
        return False

    def _change(self) -> None:
        self.passes = not self.passes
        self._seen = False
        self._window.clear()
        self._puts.clear()
        self._in_puts = 0
