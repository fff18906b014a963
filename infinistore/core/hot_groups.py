"""Which part of the reads concern the group of keys that is read most.

A group is the keys with one hash tag, which one node of a cluster has. If one is read
so much that its node has more to do than the others, more copies of it would help.

One read of a block in every few is sampled, at random, so that batches of one size are
sampled fairly. The sampled groups are counted by the algorithm *space-saving*
(Metwally, Agrawal and El Abbadi, ICDT 2005): the counter of the rarest group goes to a
new one, and what it may overstate is known. Counts are halved now and then, so that
they tell of the last few million reads.
"""

from collections.abc import Sequence
from random import Random
from typing import Final

from infinistore.keys import hash_tag

MOST_GROUPS: Final = 256
STRIDE: Final = 1024
"""One read of a block in so many is sampled. A sample of a new group takes as long as
to look up a few hundred keys."""
WINDOW: Final = 4096
"""After so many sampled reads, counts are halved."""
_FEW: Final = 64
"""Fewer sampled reads tell nothing."""


class HotGroups:
    """The groups of one store. The same calls give the same figures."""

    def __init__(self, stride: int = STRIDE) -> None:
        self._stride = stride
        self.left = 0
        """How many blocks are read until one is sampled. Who reads blocks takes their
        number off, and calls `sample` once it is negative."""
        self._total = 0
        self._counts: dict[str, int] = {}
        self._overstated: dict[str, int] = {}
        self._random = Random(1)  # to be fair, not to be unforeseen

    def sample(self, keys: Sequence[str]) -> None:
        """Sample one or more of these keys, whose blocks were read."""
        while self.left < 0:
            self._count(hash_tag(keys[self.left % len(keys)]))
            self.left += 1 + int(self._random.random() * (2 * self._stride - 1))

    def share(self) -> float:
        """Return the part of the reads that concern the hottest group, at least; 0 if
        there were few reads."""
        if self._total < _FEW:
            return 0.0
        return max(count - self._overstated[tag] for tag, count in self._counts.items()) / self._total

    def _count(self, tag: str) -> None:
        counts = self._counts
        if tag not in counts:
            before = 0
            if len(counts) == MOST_GROUPS:
                rarest = min(counts, key=counts.__getitem__)
                before = counts.pop(rarest)
                del self._overstated[rarest]
            counts[tag] = self._overstated[tag] = before
        counts[tag] += 1
        self._total += 1
        if self._total == WINDOW:
            self._total //= 2
            self._counts = {tag: count // 2 for tag, count in counts.items() if count > 1}
            self._overstated = {tag: self._overstated[tag] // 2 for tag in self._counts}
