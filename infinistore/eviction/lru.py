"""Least recently used first."""

from typing import ClassVar

from infinistore.eviction.base import Eviction


class LeastRecentlyUsed(Eviction):
    """Every use makes a key the warmest, and so does a put.

    Nothing beats it where recent prompts come again. It keeps nothing of a set of
    prompts that is a little larger than the pool and is asked for in turns.
    """

    name: ClassVar[str] = "lru"
