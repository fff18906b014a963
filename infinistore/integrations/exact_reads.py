"""Read blocks into memory of just their size, and tell hits, misses and bad blocks apart.

A block that is longer than its buffer, or whose bytes are not those that were written, fails a whole batch. An engine
wants the others all the same.
"""

import enum
from collections.abc import Sequence

from infinistore.aio import AsyncStore
from infinistore.blocking import BlockingStore
from infinistore.errors import BufferTooSmall, ChecksumMismatch
from infinistore.integrations.record import Record

__all__ = ["Outcome", "read_exactly", "read_exactly_async"]


class Outcome(enum.Enum):
    """What became of one block."""

    HIT = enum.auto()
    MISS = enum.auto()
    BAD = enum.auto()
    """It is there, but of another size, or its checksum is wrong: to be deleted, so that it is stored anew."""


_BAD_BLOCK = (BufferTooSmall, ChecksumMismatch)
_BAD_SIZE = -1


def read_exactly(store: BlockingStore, items: Sequence[tuple[str, memoryview]], record: Record) -> list[Outcome]:
    """Read blocks, each of which has to fill its buffer. After anything but a hit, what is in a buffer is undefined.

    Raises what `get_many_into` raises, but for `BufferTooSmall` and `ChecksumMismatch`.
    """
    try:
        return _outcomes(items, store.get_many_into(items), record)
    except _BAD_BLOCK as error:
        record.bad_block(error)
    sizes: list[int | None] = []
    for item in items:
        try:
            sizes += store.get_many_into([item])
        except _BAD_BLOCK:
            sizes.append(_BAD_SIZE)
    return _outcomes(items, sizes, record)


async def read_exactly_async(
    store: AsyncStore, items: Sequence[tuple[str, memoryview]], record: Record
) -> list[Outcome]:
    """`read_exactly`, over an asynchronous store."""
    try:
        return _outcomes(items, await store.get_many_into(items), record)
    except _BAD_BLOCK as error:
        record.bad_block(error)
    sizes: list[int | None] = []
    for item in items:
        try:
            sizes += await store.get_many_into([item])
        except _BAD_BLOCK:
            sizes.append(_BAD_SIZE)
    return _outcomes(items, sizes, record)


def _outcomes(items: Sequence[tuple[str, memoryview]], sizes: Sequence[int | None], record: Record) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for (key, buffer), size in zip(items, sizes, strict=True):
        if size is None:
            outcomes.append(Outcome.MISS)
        elif size == len(buffer):
            outcomes.append(Outcome.HIT)
        else:
            outcomes.append(Outcome.BAD)
            if size != _BAD_SIZE:
                record.bad_block(ValueError(f"{key!r} has {size} bytes where {len(buffer)} were expected"))
    return outcomes
