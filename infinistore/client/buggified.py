"""The parts of a client that a simulation buggifies: each does at times what it may do,
and seldom does. All are about shared memory.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import attrs

from infinistore.buggify import Buggify, Point
from infinistore.client.movers.shm.known_blocks import KnownBlocks, KnownReads, PinnedBlocks, Places
from infinistore.client.movers.shm.mapped_pool import Machine


def buggified(machine: Machine, buggify: Buggify) -> Machine:
    """Return a machine on which a client does what it seldom does."""
    return attrs.evolve(
        machine,
        known_blocks=partial(_KnownBlocks, buggify),
        known_reads=partial(_KnownReads, buggify),
    )


class _KnownBlocks(KnownBlocks):
    def __init__(self, buggify: Buggify, most: int) -> None:
        super().__init__(most)
        self._buggify = buggify

    def find(self, keys: Sequence[str]) -> Places | None:
        if self._buggify(Point.BLOCK_FORGOTTEN):
            return None
        return super().find(keys)


class _KnownReads(KnownReads):
    def __init__(self, buggify: Buggify, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._buggify = buggify

    def pin(self, keys: Sequence[str], known: Places) -> PinnedBlocks | None:
        if self._buggify(Point.HAZARDS_FULL):
            return None
        return super().pin(keys, known)

    def log(self, touch: bytes) -> bool:
        if self._buggify(Point.TOUCH_LOG_FULL):
            return False
        return super().log(touch)

    def can_commit(self, blocks: int) -> bool:
        if self._buggify(Point.COMMIT_BY_MESSAGE):
            return False
        return super().can_commit(blocks)
