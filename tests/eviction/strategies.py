"""A strategy that always does what the adaptive one rarely does."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, ClassVar

from infinistore.eviction import Reuse
from infinistore.eviction.adaptive import Adaptive

__all__ = ["Passing"]


class Passing(Adaptive):
    """New keys pass through from the first eviction on, whatever comes of it."""

    name: ClassVar[str] = "passing"

    def __init__(self, order: OrderedDict[str, Any], reuse: Reuse) -> None:
        super().__init__(order, reuse)
        reuse.on_turn = bool

    def insert(self, keys: Sequence[str], entries: Sequence[Any]) -> None:
        self.passes = self.reuse.pool_keys > 0
        super().insert(keys, entries)
