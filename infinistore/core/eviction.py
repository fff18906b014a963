"""Which blocks go when room is needed, and the bounds on how many go at once.

Least recently used goes first. A pinned block that is met at the cold end is moved to the warm end: it is in use, so it
is recent. So each step costs O(1) however many blocks are pinned, and a step is what the bounds below count.
"""

import sys
from collections.abc import Callable, Container

from infinistore.core.index import Entry, Index

__all__ = ["EXTRA_STEPS", "FRAGMENTATION_ROUNDS", "FRAGMENTATION_STEPS", "take_coldest"]

EXTRA_STEPS = 256
"""How many blocks one reservation looks at to bring the store from the high watermark down to the low one, beyond
those that it needs itself: about 0.1 ms. The way down is walked over several reservations."""

FRAGMENTATION_ROUNDS = 4
"""How often a reservation that has room, but not in large enough pieces, evicts more and tries again. The first round
evicts as many bytes as the batch has, each further one twice as many: 15 times the batch in all."""

FRAGMENTATION_STEPS = 16_384
"""How many blocks those rounds look at together, at most: some 10 ms."""


def take_coldest(
    index: Index,
    pinned: Container[Entry],
    footprint: Callable[[int], int],
    wanted_bytes: float,
    max_steps: int = sys.maxsize,
) -> tuple[list[Entry], int]:
    """Take the coldest blocks that are not pinned out of the index, until they make up `wanted_bytes` of the pool.

    Looks at no key twice, and at `max_steps` keys at most. Returns the entries, and their bytes by footprint, which
    are fewer than wanted when a bound was met first.
    """
    taken: list[Entry] = []
    taken_bytes = 0
    for _ in range(min(len(index), max_steps)):
        if taken_bytes >= wanted_bytes:
            break
        key, entry = index.pop_coldest()
        if entry in pinned:
            index.put_warmest(key, entry)
        else:
            taken.append(entry)
            taken_bytes += footprint(entry[2])
    return taken, taken_bytes
