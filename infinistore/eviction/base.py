"""The eviction interface: a strategy keeps the keys of a store in order.

The store evicts from the cold end of one order, and passes over what is pinned. A
strategy only decides where in that order a key goes when it is put or used. So pins,
holds, tenants and the bounds on the work of one call are the same with every strategy,
and a key costs a strategy nothing unless it keeps something itself.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any, ClassVar

from infinistore.eviction.reuse import Reuse

__all__ = ["Eviction", "LeastRecentlyUsed"]


class Eviction:
    """Keeps the keys of one store in order, coldest first. Used by one task at a time.

    This class is the least recently used strategy; a subclass overrides what it does
    differently. The contract of every strategy:

    - It moves keys within `order`. Only `insert` adds keys, and no method removes one.
    - Heads outlive tails: of the keys of one call, each is warmer than those after it,
      wherever the strategy puts them.
    - A call costs a constant time for each of its keys, on average, and a strategy
      keeps at most 16 bytes for each key of the store.
    - The same calls lead to the same order.

    A strategy is created with the order of an empty store, and the store's `Reuse`.
    Subclasses set `name`, and are named by an entry point in the group
    `infinistore.eviction`.
    """

    name: ClassVar[str]
    """The name for `--eviction`."""

    def __init__(self, order: OrderedDict[str, Any], reuse: Reuse) -> None:
        self.order = order
        """All keys of the store, coldest first, and something for each of them. Keys
        leave it without notice: by eviction, deletion, or because their time is
        over."""
        self.reuse = reuse
        """How soon keys are used again. It has figures while the store evicts."""

    def insert(self, keys: Sequence[str], entries: Sequence[Any]) -> None:
        """Add keys to the order, each once, with their entries. A key that is there
        gets the new entry and keeps its place; the store touches it afterwards."""
        deque(map(self.order.__setitem__, reversed(keys), reversed(entries)), 0)  # a loop in C

    def touch(self, keys: Sequence[str]) -> None:
        """Note that keys were used. KeyError, and some of them touched: one is
        missing. A key may be there twice."""
        deque(map(self.order.move_to_end, reversed(keys)), 0)

    def touch_one(self, key: str) -> None:
        """As `touch` with one key."""
        self.order.move_to_end(key)

    def pass_over(self, keys: Sequence[str]) -> None:
        """Move keys from the cold end to the warm one: they are pinned. This is no use
        of them."""
        deque(map(self.order.move_to_end, reversed(keys)), 0)


class LeastRecentlyUsed(Eviction):
    """Every use makes a key the warmest, and so does a put.

    Nothing beats it where recent prompts come again. It keeps nothing of a set of
    prompts that is a little larger than the pool and is asked for in turns.
    """

    name: ClassVar[str] = "lru"
