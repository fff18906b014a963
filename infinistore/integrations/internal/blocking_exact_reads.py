# Generated from exact_reads.py by scripts/generate.py: change that one instead.
"""Reads into buffers of exact size, which tell hits, misses and bad blocks apart.

A block that is longer than its buffer, or whose checksum is wrong, fails a whole batch.
An engine wants the other blocks all the same.
"""

from collections.abc import Sequence

from infinistore.blocking import BlockingStore
from infinistore.integrations.internal.record import BAD_BLOCK, BAD_SIZE, Outcome, Record, outcomes

__all__ = ["read_exactly"]


def read_exactly(store: BlockingStore, items: Sequence[tuple[str, memoryview]], record: Record) -> list[Outcome]:
    """Read blocks, each of which has to fill its buffer.

    After anything but a hit, the contents of a buffer are undefined. Raises what
    `get_many_into` raises, except `BufferTooSmall` and `ChecksumMismatch`.
    """
    try:
        return outcomes(items, store.get_many_into(items), record)
    except BAD_BLOCK as error:
        record.bad_block(error)
    sizes: list[int | None] = []
    for item in items:
        try:
            sizes += store.get_many_into([item])
        except BAD_BLOCK:
            sizes.append(BAD_SIZE)
    return outcomes(items, sizes, record)
