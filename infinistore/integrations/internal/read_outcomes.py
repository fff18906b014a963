"""The outcome of reading a block into a buffer of its exact size."""

import enum
from collections.abc import Sequence

from infinistore.errors import BufferTooSmall, ChecksumMismatch
from infinistore.integrations.internal.record import Record

__all__ = ["BAD_BLOCK", "BAD_SIZE", "Outcome", "outcomes"]

BAD_BLOCK = (BufferTooSmall, ChecksumMismatch)
"""The errors of a block that exists and is not what it should be."""

BAD_SIZE = -1
"""In place of the size of a block that is known to be bad."""


class Outcome(enum.Enum):
    """The outcome for one block."""

    HIT = enum.auto()
    MISS = enum.auto()
    BAD = enum.auto()
    """It exists with a wrong size or checksum. Delete it, so that it is stored anew."""


def outcomes(items: Sequence[tuple[str, memoryview]], sizes: Sequence[int | None], record: Record) -> list[Outcome]:
    """Return the outcome of each block, given its size in the store; None is a miss."""
    found: list[Outcome] = []
    for (key, buffer), size in zip(items, sizes, strict=True):
        if size is None:
            found.append(Outcome.MISS)
        elif size == len(buffer):
            found.append(Outcome.HIT)
        else:
            found.append(Outcome.BAD)
            if size != BAD_SIZE:
                record.bad_block(ValueError(f"{key!r} has {size} bytes where {len(buffer)} were expected"))
    return found
