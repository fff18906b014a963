"""A pool of so many blocks of one size, and engines that ask for prompts: look up the
blocks, read those found, and put the others.
"""

from collections.abc import Iterable, Iterator, Sequence

from infinistore.core.index import Index
from infinistore.eviction import Eviction

__all__ = ["SmallPool", "prompt", "turns"]


def prompt(name: object, blocks: int = 16) -> list[str]:
    return [f"{name}/{number}" for number in range(blocks)]


def turns(prompts: int, rounds: int, blocks: int = 16) -> Iterator[list[str]]:
    """So many prompts, each asked for in its turn."""
    return (prompt(number, blocks) for _ in range(rounds) for number in range(prompts))


class SmallPool:
    def __init__(self, eviction: type[Eviction], blocks: int) -> None:
        self.index = Index(eviction)
        self.blocks = blocks

    def ask(self, keys: Sequence[str]) -> int:
        """Return how many blocks, counted from the first, were there."""
        found = self.index.leading(keys)
        self.index.touch(found)
        self.index.touch(found)
        new = [key for key in keys if self.index.get(key) is None]
        if (excess := len(self.index) + len(new) - self.blocks) > 0:
            self.index.remove(self.index.coldest(excess))
            new = [key for key in keys if self.index.get(key) is None]
        self.index.insert(new, [(0, 0, 1 << 20, 0)] * len(new))
        return len(found)

    def ask_all(self, prompts: Iterable[Sequence[str]]) -> int:
        return sum(map(self.ask, prompts))
